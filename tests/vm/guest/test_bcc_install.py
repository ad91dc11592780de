"""bcc's own tools, unmodified, with the plugin in for their table of the kernel's symbols.

A second process runs programs; their names are the kernel's own list's. The same is asked of
bcc alone, to see that the test would tell.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.oracle import procs

_PROFILE = "/usr/sbin/profile-bpfcc"
_STACKCOUNT = "/usr/sbin/stackcount-bpfcc"
#: Named on the command line, so that nothing depends on what can be compiled in time.
_ENVIRONMENT = {"KSYM_SOURCE": "perf_event"}

#: Loads a program at each line of input, and from then on runs that one; it calls a helper,
#: so that the helper's callers can be counted.
_WORK = """
import json, os, select, sys, time
from tests.oracle import programs, rawbpf
print("{}", flush=True)
fd = None
while True:
    if select.select([0], [], [], 0 if fd else None)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        burn = programs.burn(len(line), 200)
        code = burn + programs.insn(0x85, imm=7) + programs.insn(0xB7) + programs.insn(0x95)
        fresh = rawbpf.load(code, line.strip())
        # The one before stays, so that this one cannot take its place.
        fd = fresh
        info = rawbpf.info(fd)
        print(json.dumps([info.starts[0], rawbpf.kallsyms_bpf()[info.starts[0]]]), flush=True)
    rawbpf.test_run(fd, 200)
    time.sleep(0.01)
"""


class Worker:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=procs.environment(),
            cwd=procs.REPO,
        )
        procs.read_line(self.process.stdout.fileno(), 60)

    def load(self, name):
        """Start and name of a program that runs from now on."""
        self.process.stdin.write(name.encode() + b"\n")
        self.process.stdin.flush()
        return tuple(json.loads(procs.read_line(self.process.stdout.fileno(), 60)))


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.process.stdin.close()
    procs.end_group(worker.process)


_ASK = """
import sys
from bcc import BPF
if sys.argv[1] == "installed":
    from ksym_plugin.bcc import install, uninstall
    install()
    install()
print(BPF.ksym(BPF.ksymname(b"vfs_read") + 4, show_module=True, show_offset=True).decode())
print(BPF.sym(BPF.ksymname("vfs_read"), -1).decode())
print(BPF.ksymname(b"no_such_function_anywhere"), BPF.ksymname(b"vfs_read"))
print(BPF.ksym(5, True, True).decode(), flush=True)
for line in sys.stdin:
    start, name = line.split()
    print(BPF.ksym(int(start) + 4, show_offset=True).decode(), flush=True)
    if sys.argv[1] == "installed":
        print(BPF.ksymname(name.encode()), flush=True)
if sys.argv[1] == "installed":
    uninstall()
    print(BPF.ksym(BPF.ksymname(b"vfs_read")).decode(), flush=True)
"""


def ask(how, worker):
    """What bcc says at its start, and of a program that is loaded then."""
    child = subprocess.Popen(
        [sys.executable, "-c", _ASK, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**procs.environment(_ENVIRONMENT), "PYTHONPATH": os.environ["PYTHONPATH"]},
        cwd=procs.REPO,
    )
    first = [child.stdout.readline().strip() for _ in range(4)]
    start, name = worker.load(f"later_{how}")
    rest, _ = child.communicate(f"{start} {name}\n", timeout=60)
    assert child.returncode == 0
    return first, rest.splitlines(), start, name


def static_address(name):
    for line in Path("/proc/kallsyms").read_text().splitlines():
        fields = line.split()
        if fields[2] == name and fields[1] in "tT":
            return int(fields[0], 16)
    raise AssertionError(name)


@pytest.mark.only_on("6.12")
def test_bcc_s_terms_are_kept_and_later_programs_named(worker):
    plain, stale, _, _ = ask("plain", worker)
    ours, fresh, start, name = ask("installed", worker)
    assert ours == plain
    assert ours[0] == "vfs_read+0x4 [kernel]"
    assert ours[2] == f"-1 {static_address('vfs_read')}"
    assert fresh == [f"{name}+0x4", str(start), "vfs_read"]
    assert not any("later_" in line for line in stale)


class Tool:
    """One of bcc's tools, as root would type it, or with the plugin put in."""

    def __init__(self, installed, *command):
        prefix = ["-m", "ksym_plugin.bcc"] if installed else []
        environment = {**_ENVIRONMENT, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
        # The compiler says more than a pipe holds, and nobody reads it in time.
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115 - ``end`` closes it
        self.process = subprocess.Popen(
            [sys.executable, *prefix, *command],
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
            env={**procs.environment(environment), "PYTHONPATH": os.environ["PYTHONPATH"]},
            cwd=procs.REPO,
        )
        self._limit = threading.Timer(240, self.process.kill)
        self._limit.start()
        self.out = ""

    def read_until(self, text):
        while text not in self.out:
            line = self.process.stdout.readline()
            assert line, self._said()
            self.out += line

    def end(self):
        """All it printed."""
        self.out += self.process.stdout.read()
        status = self.process.wait(30)
        self._limit.cancel()
        said = self._said()
        self.process.stdout.close()
        self._err.close()
        assert status == 0, said
        return self.out

    def _said(self):
        self._err.seek(0)
        return self.out + self._err.read()[-4000:]


@pytest.mark.slow
@pytest.mark.only_on("6.12")
def test_profile_names_a_program_loaded_after_it_started(worker):
    worker.load("before")
    tool = Tool(True, _PROFILE, "-K", "-F", "199", "-p", str(worker.process.pid), "12")
    tool.read_until("Sampling at 199 Hertz")
    # bcc has tried programs of its own: whoever gets one of their places is marked.
    for number in range(8):
        worker.load(f"filler_{number}")
    _, name = worker.load("meanwhile")
    assert re.search(rf"^ +{name}$", tool.end(), re.MULTILINE), tool.out


@pytest.mark.slow
@pytest.mark.only_on("6.1")
@pytest.mark.parametrize("installed", [False, True], ids=["plain", "installed"])
def test_stackcount_names_a_program_loaded_after_its_first_report(worker, installed):
    """It asks for names every few seconds; bcc's own table is the first report's."""
    _, first = worker.load("before")
    tool = Tool(installed, _STACKCOUNT, "-K", "-i", "4", "-D", "16", "bpf_user_rnd_u32")
    tool.read_until(first)
    _, later = worker.load("meanwhile")
    assert (later in tool.end()) == installed, tool.out
