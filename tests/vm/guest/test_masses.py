"""Thousands of programs at once, which only a guest may be asked to hold."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ksym_plugin.history.reader import History
from ksym_plugin.history.recorder import Recorder
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.sources.probe import KprobeSource
from ksym_plugin.timeline.symbols import GAP, LOST
from tests.oracle import procs, programs, rawbpf
from tests.vm.guest import burst

CLI = [sys.executable, "-m", "ksym_plugin.cli"]
SECONDS = 400.0

pytestmark = pytest.mark.slow


def kernel_table(fds: list[int]) -> dict[int, tuple[int, str]]:
    """Start to end and name of these programs, from bpf(2) and kallsyms."""
    names = rawbpf.kallsyms_bpf()
    infos = map(rawbpf.info, fds)
    return {s: (s + n, names[s]) for info in infos for s, n in zip(info.starts, info.lens)}


class Loads(threading.Thread):
    """Loads and unloads as fast as it can while a recorder is at work, then stops that."""

    def __init__(self, recorder: Recorder, stop: int) -> None:
        super().__init__()
        self._recorder = recorder
        self._stopping = stop
        self.held: list[int] = []
        self.ended = 0
        #: CPU seconds of this process in three seconds before it began, and after it was all over.
        self.before = self.idle = 0.0

    def run(self) -> None:
        try:
            self.before = cpu_in(3)
            for _ in range(3):
                fds, _ = burst.load(2_000)
                burst.unload(fds)
            self.held, _ = burst.load(1_000)
            self.ended = time.monotonic_ns()
            deadline = time.monotonic() + 60
            while self._recorder.covered < self.ended and time.monotonic() < deadline:
                time.sleep(0.05)
            self.idle = cpu_in(3)
        finally:
            os.write(self._stopping, b"s")


def cpu_in(seconds: float) -> float:
    """CPU seconds of this process in so many seconds of doing nothing else."""
    used = time.process_time()
    time.sleep(seconds)
    return time.process_time() - used


@pytest.mark.only_on("6.12")
def test_the_table_is_exact_again_after_losses(tmp_path: Path) -> None:
    burst.allow(20_000)
    path = str(tmp_path / "x.db")
    began = time.monotonic_ns()
    source, clock = KprobeSource(ring_bytes=8 * 4096), PerfClock()
    recorder = Recorder(source, HistoryWriter(path, "kprobe", began, None), clock)
    recorder.start()
    stopping, stop = os.pipe()
    loads = Loads(recorder, stop)
    loads.start()
    recorder.run(None, stopping)
    loads.join()
    recorder.finish()
    source.close()
    clock.close()
    live = {
        life.symbol.start: (life.symbol.end, life.symbol.name) for life in recorder.timeline.live()
    }
    truth, standing = kernel_table(loads.held), rawbpf.kallsyms_bpf()
    print(
        f"{recorder.tracker.losses} losses, {recorder.tracker.resyncs - 1} resyncs in"
        f" {(loads.ended - began) / 1e9:.1f} s; idle before {loads.before / 3 * 100:.1f} %,"
        f" afterwards {loads.idle / 3 * 100:.1f} %"
    )
    assert recorder.tracker.losses > 0
    assert recorder.covered >= loads.ended, "no resync brought it back to the present"
    assert {start: live.get(start) for start in truth} == truth
    # The probe's own programs are gone by now, with their lines.
    assert {start: name for start, (_, name) in live.items() if start in standing} == standing
    assert loads.idle < 1.5 * loads.before + 0.2, loads.before
    with History(path) as history:
        past = history.recorded(history.boots()[-1])
        gap = past.losses[0]
        said = past.at(next(iter(truth)), (gap.since + gap.until) // 2)[1]
        assert said == GAP or said is LOST
    burst.unload(loads.held)


@pytest.mark.only_on("6.1")
def test_a_steady_stream_beside_thousands_costs_little(tmp_path: Path) -> None:
    """100 loads a second with 5,000 programs there, against re-reading kallsyms each time."""
    burst.allow(20_000)
    seconds = 15
    history = str(tmp_path / "x.db")
    recorder = procs.start(
        [*CLI, "record", "--source", "kprobe", "-o", history], err=subprocess.PIPE
    )
    try:
        assert recorder.stderr is not None
        assert b"recording with kprobe" in procs.read_line(recorder.stderr.fileno(), SECONDS)
        held, _ = burst.load(5_000)
        before = cpu_at_rest(recorder.pid)
        seen = []
        due = time.monotonic()
        for number in range(seconds * 100):
            fd = programs.plain(f"steady_{number}", number, work=20)
            info = rawbpf.info(fd)
            seen.append((info.starts[0], f"bpf_prog_{info.tag}_{info.name}", time.monotonic_ns()))
            os.close(fd)
            due += 0.01
            time.sleep(max(0.0, due - time.monotonic()))
        took = time.monotonic() - due + seconds
        ours = cpu_of(recorder.pid) - before
    finally:
        recorder.terminate()
        _, said = recorder.communicate(timeout=SECONDS)
    assert recorder.returncode == 0, said
    began = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(3):
        with open("/proc/kallsyms", "rb") as file:
            file.read()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    read = (ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime) / 3
    changes = 2 * len(seen)
    print(
        f"{changes} changes in {took:.0f} s: ours {ours:.2f} s of CPU, a re-read {read:.2f} s,"
        f" {read * changes / ours:.0f} times as much"
    )
    assert read * changes >= 100 * ours
    with History(history) as opened:
        past = opened.recorded(opened.boots()[-1])
        for start, name, when in seen:
            lifetime, certainty = past.at(start, when)
            assert lifetime is not None, certainty
            assert (lifetime.symbol.name, certainty) == (name, "exact")
    burst.unload(held)


def cpu_at_rest(pid: int) -> float:
    """Seconds of CPU that a process has used when it has caught up with what came."""
    deadline = time.monotonic() + 60
    used = cpu_of(pid)
    while time.monotonic() < deadline:
        time.sleep(1)
        before, used = used, cpu_of(pid)
        if used - before < 0.05:
            break
    return used


def cpu_of(pid: int) -> float:
    """Seconds of CPU a process has used, user and system (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
