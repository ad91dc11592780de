"""Hosts over this kernel: the tutorial's sampler and contrib's, as they are, and forks.

The runner of ``tests.oracle`` runs programs that another process loads and unloads in turn;
what their names are comes from bpf(2), and when they were there from who loaded them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from ksym_hooks import get_plugin_manager, is_frame
from ksym_plugin.timeline.symbols import NOT_LOADED
from tests.oracle import procs
from tests.unit.hosts import fds, tasks, wait_until
from tests.unit.listings import REPO, listings

SECONDS = 6

#: Loads and runs programs in turn until its input ends; says what each was called, and until when
#: it ran.
_WORK = """
import json, os, select, sys, time
from tests.oracle import programs, rawbpf
told, number = [], 0
print("{}", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    fd = programs.plain(f"turn_{number}", number)
    info = rawbpf.info(fd)
    rawbpf.test_run(fd, 1)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        rawbpf.test_run(fd, 200)
    told.append([f"bpf_prog_{info.tag}_{info.name}", time.monotonic()])
    os.close(fd)
    time.sleep(0.02)
print(json.dumps(told), flush=True)
"""


class Work:
    def __init__(self):
        self._child = subprocess.Popen(
            [sys.executable, "-c", _WORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=procs.environment(),
            cwd=procs.REPO,
        )
        procs.read_line(self._child.stdout.fileno(), 120)

    def names(self):
        """Name of each program, and until when it ran."""
        self._child.stdin.close()
        return dict(json.loads(procs.read_line(self._child.stdout.fileno(), 120)))

    def end(self):
        self._child.stdin.close()
        procs.end_group(self._child)


def in_stacks(text):
    """How often each BPF program of the test was the innermost frame."""
    counts = {}
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        leaf = stack.split(";")[-1]
        if "_turn_" in leaf:
            counts[leaf] = counts.get(leaf, 0) + int(count)
    return counts


def host(folder, text, *arguments):
    path = folder / "host.py"
    path.write_text(text)
    parts = (REPO, os.path.join(REPO, "hooks"), os.path.join(REPO, "contrib", "sampler"))
    environment = {"PYTHONPATH": os.pathsep.join(parts)}
    return procs.run([sys.executable, str(path), *arguments], 60, env=environment)


@pytest.mark.parametrize("which", ["tutorial", "contrib"])
def test_a_sampler_names_programs_that_others_load_and_unload_while_it_runs(tmp_path, which):
    if which == "tutorial":
        text, arguments = listings()["host.py"], [str(SECONDS)]
    else:
        path = os.path.join(REPO, "contrib", "sampler", "ksym_sampler.py")
        with open(path, encoding="utf-8") as file:
            text, arguments = file.read(), ["--seconds", str(SECONDS), "--hertz", "499"]
    work = Work()
    try:
        done = host(tmp_path, text, *arguments)
        ended = time.monotonic()
        names = work.names()
    finally:
        work.end()
    counts = in_stacks(done.out)
    # Every name there is one that was there; and most that were there have been met.
    assert {name.rstrip("?") for name in counts} <= set(names)
    sampled = [name for name, until in names.items() if ended - SECONDS < until < ended]
    assert len(counts) >= len(sampled) // 3 > 5
    assert sum(counts.values()) > 100
    assert "bpf_test_run" in done.out
    lines = done.out.splitlines()
    assert all(line.rpartition(" ")[2].isdigit() for line in lines)


def test_nothing_stays_behind_over_many_starts():
    threads = tasks()
    with get_plugin_manager() as manager:
        manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
    wait_until(lambda: tasks() == threads)
    before = set(fds())
    for _ in range(5):
        with get_plugin_manager() as manager:
            manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
            assert tasks() > threads
        wait_until(lambda: tasks() == threads)
        assert set(fds()) == before


_TELL = """
import json, os, time
from tests.oracle import programs, rawbpf
fd = programs.plain("forked", 77)
info = rawbpf.info(fd)
print(json.dumps([info.starts[0], rawbpf.kallsyms_bpf()[info.starts[0]]]), flush=True)
time.sleep(600)
"""


def test_a_forked_child_of_a_live_host_answers_and_leaves_the_parent_s_source_alone():
    with get_plugin_manager() as manager:

        def ask(address, at=None):
            (answer,) = manager.hook.ksym_resolve_frames(
                addresses=[address], time=at, clock="monotonic"
            )
            return f"{answer.name} {answer.certainty}" if is_frame(answer) else answer.text

        ask(0)
        child = subprocess.Popen(
            [sys.executable, "-c", _TELL],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=procs.environment(),
            cwd=procs.REPO,
        )
        try:
            start, name = json.loads(procs.read_line(child.stdout.fileno(), 120))
            assert ask(start, time.monotonic_ns()) == f"{name} exact"
            forked = os.fork()
            if forked == 0:
                import warnings

                warnings.simplefilter("ignore")
                os._exit(0 if ask(start) == f"{name} gap" else 1)
            assert os.waitpid(forked, 0)[1] == 0
        finally:
            procs.end_group(child)
        wait_until(lambda: ask(start, time.monotonic_ns()) != f"{name} exact")
        assert ask(start, time.monotonic_ns()) in (
            f"{name} grace",
            NOT_LOADED.text,
        )
