"""``ksym pyspy record`` on processes that know what they did when, and on awkward ones."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from ksym_plugin.stacks import folded
from tests.live.conftest import LACK, _require
from tests.oracle import procs, spied

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORD = [sys.executable, "-m", "ksym_plugin.cli", "pyspy", "record"]
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
_PTRACE_SEIZE = 0x4206
#: How long anything may take, on a machine that others keep busy.
SECONDS = 120.0

pytestmark = pytest.mark.usefixtures("perf")


@pytest.fixture(autouse=True)
def _py_spy() -> None:
    """py-spy is there."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    if shutil.which("py-spy") is None and not os.path.exists(beside):
        _require(LACK, "py-spy is not installed (pip install py-spy)")


def phases(truth: Path, ms: float, seconds: float, *more: str) -> list[str]:
    call = [PYTHON, "-m", "tests.oracle.phases", "--truth", str(truth), "--ms", str(ms)]
    return [*call, "--seconds", str(seconds), *more]


@contextlib.contextmanager
def running(command: list[str], truth: Path | None = None) -> Iterator[int]:
    """A process in a group of its own, and its id once it is at work, which ``truth`` tells."""
    child = procs.start(command)
    try:
        until = time.monotonic() + SECONDS
        while truth is not None and not truth.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        yield child.pid
    finally:
        procs.end_group(child)


def record(folder: Path, *arguments: str, status: int | None = 0) -> procs.Done:
    outputs = ["-o", str(folder / "out.json"), "--folded", str(folder / "out.folded")]
    return procs.run([*RECORD, *outputs, *arguments], 90, status=status)


def kept(folder: Path, ms: float, *more: str) -> tuple[spied.Score, bool, procs.Done]:
    """A run of the workload: how true it is, whether the check passed, what was said."""
    keep = folder / "kept"
    command = phases(folder / "truth.json", ms, 5)
    done = record(folder, "--keep", str(keep), *more, "--", *command)
    shutil.copy(folder / "truth.json", keep)
    perf_text(keep)
    score, verdict = spied.score(keep)
    return score, verdict.passes, done


def perf_text(keep: Path) -> None:
    """What perf script prints of a recording, beside it, with the history's names."""
    fields = "comm,pid,tid,time,event,ip,sym,symoff,dso"
    call = ["perf", "script", "--ns", "--header", "-F", fields, "-i", str(keep / "perf.data")]
    plain = keep / "plain.txt"
    plain.write_text(procs.run(call, 60).out, encoding="utf-8")
    call = [sys.executable, "-m", "ksym_plugin.cli", "annotate", "-H", str(keep / "ksym.db")]
    named = procs.run([*call, str(plain)], 60).out
    (keep / "perf.txt").write_text(named, encoding="utf-8")


def counts(folder: Path) -> dict[str, float]:
    with open(folder / "out.folded", "rb") as file:
        return folded.parse(file).by_text()


def share(line: str, word: str) -> float:
    """The percentage before a word in what was said."""
    return float(line.partition(f" % {word}")[0].rpartition(" ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("ms", [50, 100])
def test_leaves_and_bpf_are_right_where_they_are_given(ms: int, tmp_path: Path) -> None:
    score, passes, done = kept(tmp_path, ms)
    told = (
        f"{ms} ms: {score.given} of {score.samples} given, {score.right} right; BPF"
        f" {score.bpf_right} of {score.bpf}; {done.err}"
    )
    print(told)
    if not passes:  # Two busy threads and py-spy on a busy machine: too few samples to tell.
        assert "withheld" in done.err
        return
    assert score.right >= 0.99 * score.given, told
    assert score.bpf > 20, told
    assert score.bpf_right >= 0.99 * score.bpf, told


@pytest.mark.slow
def test_leaves_of_two_milliseconds_are_withheld(tmp_path: Path) -> None:
    _, passes, done = kept(tmp_path, 2)
    assert not passes
    assert "withheld" in done.err
    assert not any(
        name in stack for stack in counts(tmp_path) for name in ("statting (", ".reading (")
    )


@pytest.mark.slow
def test_families_are_sampled_together(tmp_path: Path) -> None:
    calls = [phases(tmp_path / f"{name}.json", 100, 4) for name in "ab"]
    script = f"{' '.join(calls[0])} & {' '.join(calls[1])}; wait"
    keep = tmp_path / "kept"
    record(tmp_path, "--subprocesses", "--keep", str(keep), "--", "sh", "-c", script)
    truth = {}
    for name in "ab":
        with open(tmp_path / f"{name}.json", encoding="utf-8") as file:
            truth.update(json.load(file))
    with open(keep / "truth.json", "w", encoding="utf-8") as file:
        json.dump(truth, file)
    perf_text(keep)
    score, _ = spied.score(keep)
    assert score.samples > 500
    assert score.right >= 0.99 * score.given > 100


@pytest.mark.slow
def test_ids_in_a_namespace_are_translated(tmp_path: Path) -> None:
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *phases(tmp_path / "t", 100, 8)]
    with running(inside, tmp_path / "t") as outer:
        with open(f"/proc/{outer}/task/{outer}/children", encoding="ascii") as file:
            pid = file.read().split()[0]
        done = record(tmp_path, "-p", pid, "--duration", "2", "--force")
    assert share(done.err, "matched") > 20


@pytest.mark.slow
def test_a_process_that_ends_first_ends_the_recording(tmp_path: Path) -> None:
    with running(phases(tmp_path / "t", 100, 20), tmp_path / "t") as pid:
        done = record(tmp_path, "-p", str(pid), "--duration", "60")
    assert "samples a second" in done.err
    assert sum(counts(tmp_path).values()) > 50


@pytest.mark.slow
def test_threads_that_come_and_go_are_right_or_unknown(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    command = phases(tmp_path / "truth.json", 60, 5, "--churn")
    record(tmp_path, "--keep", str(keep), "--", *command)
    shutil.copy(tmp_path / "truth.json", keep)
    perf_text(keep)
    score, _ = spied.score(keep)
    assert score.samples > 500
    assert score.right >= 0.99 * score.given


@pytest.mark.slow
def test_native_frames_stand_between(tmp_path: Path) -> None:
    with running(phases(tmp_path / "t", 200, 10), tmp_path / "t") as pid:
        record(tmp_path, "-p", str(pid), "--duration", "3", "--native", "--force")
    found = [stack.split(";") for stack in counts(tmp_path) if ";send;" in stack]
    assert found
    for stack in found:
        at = stack.index("send")
        assert "filtering (" in stack[at - 1] or "sock_send" in stack[at - 1]


def test_status_of_a_command_is_passed_on(tmp_path: Path) -> None:
    code = "import sys, time; time.sleep(1); sys.exit(7)"
    assert record(tmp_path, "--", PYTHON, "-c", code, status=None).status == 7


# What is refused


def test_a_process_that_has_ended_before_anything_began_is_said_to(tmp_path: Path) -> None:
    done = record(tmp_path, "--", "/nonexistent", status=1)
    assert "/nonexistent cannot be run" in done.err
    assert "ended before it could be sampled" in done.err


def test_a_process_under_a_debugger_is_refused(tmp_path: Path) -> None:
    with running(phases(tmp_path / "t", 100, 20), tmp_path / "t") as pid:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.ptrace(_PTRACE_SEIZE, pid, 0, 0) == 0
        done = record(tmp_path, "-p", str(pid), status=1)
    assert f"held by process {os.getpid()}" in done.err


@pytest.mark.slow
def test_many_threads_are_not_stopped_often(tmp_path: Path) -> None:
    with running(phases(tmp_path / "t", 100, 20, "--idlers", "40"), tmp_path / "t") as pid:
        done = record(tmp_path, "-p", str(pid), status=1)
        assert "--rate 20" in done.err
        record(tmp_path, "-p", str(pid), "--rate", "20", "--duration", "1")


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    with running(["sleep", "60"]) as pid:
        done = record(tmp_path, "-p", str(pid), status=1)
    assert "python version" in done.err
    assert "Traceback" not in done.err
    assert record(tmp_path, "-p", "4194305", status=1).err.startswith("ksym: there is no process")


@pytest.mark.slow
def test_nothing_is_left_holding_the_process_when_we_are_killed(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    with running(phases(tmp_path / "t", 100, 30), tmp_path / "t") as pid:
        child = procs.start([*RECORD, "--keep", str(keep), "-p", str(pid), "--duration", "60"])
        log = keep / "pyspy.log"
        until = time.monotonic() + SECONDS
        while not (log.exists() and b"attached to" in log.read_bytes()):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(SECONDS)
        until = time.monotonic() + SECONDS
        while tracer(pid) != "0" or at_work_in(keep):
            assert time.monotonic() < until
            time.sleep(0.05)


def at_work_in(folder: Path) -> bool:
    """Whether any process was started with that folder in its arguments."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if os.fsencode(f"{folder}/") in file.read():
                return True
    return False


def tracer(pid: int) -> str:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(line.split()[1] for line in file if line.startswith("TracerPid"))


# Python from 3.12 on


@pytest.mark.slow
@pytest.mark.usefixtures("perf_python")
def test_frames_of_perf_support_stay_whole(newer_pythons: list[str], tmp_path: Path) -> None:
    for number, python in enumerate(newer_pythons):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_frames_stay_whole(python, folder)


def assert_frames_stay_whole(python: str, tmp_path: Path) -> None:
    data, text = str(tmp_path / "perf.data"), tmp_path / "perf.txt"
    call = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "499", "--call-graph", "dwarf"]
    target = [python, "-X", "perf", *phases(tmp_path / "t", 50, 1)[1:]]
    procs.run([*call, "-k", "CLOCK_MONOTONIC", "-o", data, "--", *target], 60)
    ksym = [sys.executable, "-m", "ksym_plugin.cli"]
    theirs = procs.run(["perf", "script", "-i", data], 60).out
    ours = procs.run([*ksym, "script", "-i", data], 60).out
    text.write_text(theirs, encoding="utf-8")
    repaired = procs.run([*ksym, "annotate", str(text)], 60).out
    wanted = frames(theirs)
    assert any("py::statting:" in frame for frame in wanted)
    assert frames(ours) == wanted
    assert frames(repaired) == wanted
    for line in procs.run([*ksym, "fold", str(text)], 60).out.splitlines():
        for frame in line.rpartition(" ")[0].split(";"):
            if "statting" in frame:
                assert frame.startswith("py::statting:/")
                assert folded.frame_of(frame).kind == "python"


def frames(text: str) -> list[str]:
    lines = (line.strip().partition(" ")[2] for line in text.splitlines())
    return [line for line in lines if line.startswith("py::")]


@pytest.mark.slow
def test_perf_support_is_named_first(newer_pythons: list[str], tmp_path: Path) -> None:
    with running([newer_pythons[0], *phases(tmp_path / "t", 100, 20)[1:]], tmp_path / "t") as pid:
        done = record(tmp_path, "-p", str(pid), "--duration", "1")
    assert "-X perf" in done.err.splitlines()[0]
