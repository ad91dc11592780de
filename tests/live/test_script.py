"""``ksym script`` is perf script's own text: not one other byte but kernel frames' names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle import procs

KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
SECONDS = 120.0
WORK = ["sh", "-c", "ls -lR /usr/lib/python3 > /dev/null; ls -lR /etc > /dev/null 2>&1"]
RECORDINGS = {
    "events": ["-e", "cpu-clock", "-e", "sched:sched_switch", "-g"],
    "dwarf": ["-e", "cpu-clock", "--call-graph", "dwarf", "-k", "CLOCK_MONOTONIC"],
    "plain": ["-e", "cpu-clock"],
}
OPTIONS = [
    "",
    "--ns --header",
    "--reltime",
    "--deltatime --ns",
    "-F comm,ip,sym",
    "-F ip,sym,symoff -C 0",
    "-F +pid,-time",
    "-F -dso",
    "-F time,event",
    "-G",
    "--show-task-events --show-mmap-events",
    "--stop-bt=do_syscall_64 --max-stack 9",
    "-S do_syscall_64,clear_page_erms",
    "-I --no-inline",
]
#: The name and the file of a kernel frame, in a callchain or behind a header.
_KERNEL = re.compile(rb"^(\t *|.*: +)([89a-f][0-9a-f]{15}) [^\n]*$", re.MULTILINE)

pytestmark = [pytest.mark.usefixtures("perf"), pytest.mark.slow]


def without_names(text: bytes) -> bytes:
    return _KERNEL.sub(rb"\1\2", text)


@pytest.fixture(scope="module", params=sorted(RECORDINGS))
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "perf.data"
    words = ["perf", "record", "-q", "-o", str(path), *RECORDINGS[request.param], "--", *WORK]
    procs.run(words, SECONDS)
    return path


def run(folder: Path, *command: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PYTHONPATH": procs.REPO}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, timeout=300, check=False, **streams
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_every_other_byte_is_perf_s(data: Path, options: str) -> None:
    words = ["script", "-i", str(data), *options.split()]
    theirs, ours = run(data.parent, "perf", *words), run(data.parent, *KSYM, *words)
    assert ours.returncode == theirs.returncode
    assert without_names(ours.stdout) == without_names(theirs.stdout)


def test_a_perf_data_in_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "piped"
    with open(path, "wb") as file:
        words = ["perf", "record", "-q", "-e", "cpu-clock", "-g", "-o", "-", "--", *WORK]
        subprocess.run(words, stdout=file, stderr=subprocess.DEVNULL, check=True, timeout=60)
    theirs = run(tmp_path, "perf", "script", "-i", str(path)).stdout
    assert theirs.count(b"cpu-clock") > 20
    assert without_names(run(tmp_path, *KSYM, "script", "-i", "piped").stdout) == without_names(
        theirs
    )
    with open(path, "rb") as file:
        piped = run(tmp_path, "sh", "-c", f"cat | {' '.join(KSYM)} script -i -", stdin=file)
    assert without_names(piped.stdout) == without_names(theirs)


def test_a_perf_without_python_is_enough(data: Path, tmp_path: Path) -> None:
    """A perf that runs no scripts prints and draws all the same; doctor says what is lost."""
    fake = tmp_path / "perf"
    perf = subprocess.check_output(["sh", "-c", "command -v perf"], text=True).strip()
    fake.write_text(
        "#!/bin/sh\n"
        'for word; do [ "$word" = -s ] && exit 129; done\n'
        'if [ "$1" = version ]; then echo "libpython: [ OFF ]"; exit; fi\n'
        f'exec {perf} "$@"\n'
    )
    fake.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": procs.REPO, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def ksym(*words: str) -> str:
        done = subprocess.run(
            [*KSYM, *words], cwd=data.parent, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "cpu-clock" in ksym("script", "-i", str(data))
    for form in ("folded", "svg", "speedscope"):
        assert ksym("script", "-i", str(data), "--format", form)
    assert "samples of cpu-clock" in ksym("report", "-i", str(data))
    doctor = subprocess.run([*KSYM, "doctor"], env=env, capture_output=True, text=True, timeout=300)
    assert "perf script -s" in doctor.stdout + doctor.stderr
