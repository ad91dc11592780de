"""The recorder at work: how soon it knows a program, and what it costs.

Programs are loaded and unloaded one at a time by a process of its own. Latency is from
BPF_PROG_LOAD's return there to the end of the step after which the recorder's timeline
names the program, in wall time, with the recorder scheduled as ``ksym record`` is. Costs
are CPU time of a process that only records, its history on disk. Peer: the polling
source, its rounds in turn with the others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from json import loads

from bench.bench_change import FEWER, REREAD, REREAD_NOTE
from bench.measure import REPO, Figures, in_child
from bench.report import CPU, WALL, not_measured, row
from ksym_plugin.history.recorder import Recorder
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.kernel.worker import run_promptly
from ksym_plugin.sources import open_source
from tests.oracle import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeVar

    R = TypeVar("R", bound=Recorder)

ROUNDS, LOADS, PAUSE_MS, IDLE_SECONDS = 4, 100, 12, 5
QUICK = (1, 10, 5, 1)
_NAME = "load to resolvable, median"
_MEDIAN, _P99 = ("<=", 1), ("<=", 10)


class Watched(Recorder):
    """A recorder that notes when each symbol first had an answer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: dict[tuple[int, str], int] = {}

    def step(self) -> None:
        before = self.tracker.changes
        super().step()
        if self.tracker.changes == before:
            return
        now = time.monotonic_ns()
        for held in self.timeline.live():
            found, _ = self.timeline.at(held.symbol.start, now)
            if found is held:
                self.known.setdefault((held.symbol.start, held.symbol.name), now)


@contextlib.contextmanager
def recording(source_name: str, make: type[R]) -> Iterator[R]:
    """A recorder that has started, and the writer and source it drives."""
    with tempfile.TemporaryDirectory(prefix="ksym-bench-") as folder:
        source, _ = open_source(source_name)
        clock = PerfClock()
        writer = HistoryWriter(os.path.join(folder, "live.db"), source.name, 0, None)
        recorder = make(source, writer, clock)
        recorder.start()
        run_promptly()
        try:
            yield recorder
        finally:
            recorder.finish()
            clock.close()
            source.close()


def run_beside(
    recorder: Recorder, count: int, pause: int
) -> tuple[list[tuple[int, str, int]], float]:
    """Record while programs come and go; what their loader says of each, and CPU seconds."""
    stop, stopping = os.pipe()
    command = [sys.executable, "-m", "bench.live_loader", str(count), str(pause)]
    loader = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    said: list[str] = []

    def listen() -> None:
        said.append(loader.communicate()[0])
        os.write(stopping, b".")

    listener = threading.Thread(target=listen)
    listener.start()
    limit = time.monotonic_ns() + 60_000_000_000
    began = time.process_time()
    recorder.run(limit, stop)
    spent = time.process_time() - began
    if time.monotonic_ns() >= limit:
        loader.kill()
    listener.join()
    os.close(stop)
    os.close(stopping)
    if loader.returncode:
        raise RuntimeError(f"the loader ended with {loader.returncode}")
    return [tuple(loads(line)) for line in said[0].splitlines()], spent


def latencies(source_name: str, count: int, pause: int) -> list[float | None]:
    """Milliseconds for each load; None for a program that was never named."""
    with recording(source_name, Watched) as recorder:
        loaded, _ = run_beside(recorder, count, pause)
        known = recorder.known
    times = (known.get((start, name)) for start, name, _ in loaded)
    return [
        None if at is None else (at - returned) / 1e6 for at, (_, _, returned) in zip(times, loaded)
    ]


def costs(source_name: str, count: int, pause: int, idle: int) -> tuple[float, float, int]:
    """CPU seconds an idle second, CPU seconds a change, and the changes there were."""
    with recording(source_name, Recorder) as recorder:
        stop, stopping = os.pipe()
        began = time.process_time()
        recorder.run(time.monotonic_ns() + idle * 1_000_000_000, stop)
        resting = (time.process_time() - began) / idle
        os.close(stop)
        os.close(stopping)
        before, clock = recorder.tracker.changes, time.monotonic()
        _, spent = run_beside(recorder, count, pause)
        spent -= resting * (time.monotonic() - clock)
        changes = recorder.tracker.changes - before
    return resting, spent / max(changes, 1), changes


def rows(quick: bool) -> list[dict[str, Any]]:
    rounds, count, pause, idle = QUICK if quick else (ROUNDS, LOADS, PAUSE_MS, IDLE_SECONDS)
    why = "needs root" if os.geteuid() else ""
    if not why:
        state, reason = probe.ask()
        why = "" if state == probe.ANSWERS else reason
    if why:
        return [not_measured(_NAME, "ms", _MEDIAN, why)]
    taken: dict[str, list[float | None]] = {"auto": [], "polling": []}
    for _ in range(rounds):
        for source in taken:
            taken[source] += in_child("bench_live", "latencies", source, count, pause, seconds=120)
    resting, change, changes = in_child("bench_live", "costs", "auto", count * 2, pause, idle)
    _, burst, together = in_child("bench_live", "costs", "auto", count * 2, 0, idle)
    polled_rest, polled, _ = in_child("bench_live", "costs", "polling", count * 2, pause, idle)
    ours, theirs = named(taken["auto"]), named(taken["polling"])
    missed = f"{len(taken['auto']) - len(ours)} of {len(taken['auto'])} never named; "
    missed += f"by polling {len(taken['polling']) - len(theirs)} of {len(taken['polling'])}"
    return [
        row(
            _NAME,
            percentile(ours, 50),
            "ms",
            _MEDIAN,
            WALL,
            "polling",
            percentile(theirs, 50),
            f"{len(taken['auto'])} loads; below 0: named before BPF_PROG_LOAD had returned",
        ),
        row(
            "load to resolvable, 99 %",
            percentile(ours, 99),
            "ms",
            _P99,
            WALL,
            "polling",
            percentile(theirs, 99),
            missed,
        ),
        row(
            "CPU of a change, source to history",
            change * 1e6,
            "us",
            None,
            CPU,
            "polling",
            polled * 1e6,
            f"{changes} changes, each a wake-up of its own, commits in it",
        ),
        row("  re-read of kallsyms, times that", REREAD / change, "times", FEWER, note=REREAD_NOTE),
        row(
            "  in a burst",
            burst * 1e6,
            "us",
            None,
            CPU,
            note=f"{together} changes, as fast as one loader makes them",
        ),
        row("  re-read of kallsyms, times that", REREAD / burst, "times", FEWER, note=REREAD_NOTE),
        row("CPU while idle", resting * 1e3, "ms each s", None, CPU, "polling", polled_rest * 1e3),
    ]


def named(values: list[float | None]) -> list[float]:
    return sorted(value for value in values if value is not None)


def percentile(ordered: list[float], percent: int) -> Figures | None:
    if not ordered:
        return None
    return Figures([ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]])
