"""The recorder over a scripted source, a scripted clock and a kernel made of a dict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable

import pytest

from ksym_plugin.history.reader import BootHistory, History
from ksym_plugin.history.recorder import Recorder
from ksym_plugin.history.schema import HEARTBEAT
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import Instant
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import EXACT, GAP, OUTSIDE_HISTORY, Load, Loss, Unload
from ksym_plugin.timeline.tracker import Source
from tests.unit.helpers import BASE, load, told, unload

SECOND = 1_000_000_000
START = 1000 * SECOND


class Time:
    """Stands in for the time module; time passes when somebody says so, and a little always."""

    def __init__(self) -> None:
        self.now = START

    def monotonic_ns(self) -> int:
        self.now += 1000
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)
        self.asleep()

    def asleep(self) -> None:
        """What happens meanwhile."""


class Kernel(Source):
    """Holds programs by start, and tells a source's changes unless they are ``muted``."""

    name = "scripted"

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.time = time
        self.held: dict[int, tuple[str, int, int]] = {}
        self.waiting: list[Load | Unload | Loss] = []
        self.muted = False
        self.broken = False
        self.calls: list[str] = []
        self.last_id = 0
        #: How long a snapshot takes, and what happens in the midst of it.
        self.slowness = 1000
        self.meanwhile: Callable[[], object] = lambda: None
        self.reading, self.writing = os.pipe()

    def add(self, slot: int) -> None:
        if slot in self.held:
            self.remove(slot)
        now = self.time.monotonic_ns()
        self.last_id += 1
        name = f"bpf_prog_{self.last_id:016x}_p"
        self.held[slot] = (name, self.last_id, now)
        self._tell(load(BASE + 0x400 * slot, 0x300, name, now, self.last_id))

    def remove(self, slot: int) -> None:
        if slot in self.held:
            name, prog_id, _ = self.held.pop(slot)
            self._tell(unload(BASE + 0x400 * slot, self.time.monotonic_ns(), name, prog_id))

    def _tell(self, change: Load | Unload | Loss) -> None:
        if not self.muted:
            self.waiting.append(change)

    def lose(self, since: int) -> None:
        self.waiting.append(Loss(since, self.time.monotonic_ns(), "scripted", 1))

    def fileno(self) -> int:
        return self.reading

    def read(self) -> list[Load | Unload | Loss]:
        self.calls.append("read")
        waiting, self.waiting = self.waiting, []
        return waiting

    def snapshot(self) -> list[Load]:
        self.calls.append("snapshot")
        if self.broken:
            raise SourceError("the kernel does not tell")
        half = sorted(self.held.items())
        self.meanwhile()
        self.time.now += self.slowness
        now = self.time.monotonic_ns()
        return [
            load(BASE + 0x400 * slot, 0x300, name, (since, now), prog_id)
            for slot, (name, prog_id, since) in half
        ]

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


class Clock:
    """Reads of perf's clock, 5 ns behind."""

    def __init__(self, time: Time) -> None:
        self.time = time

    def read(self) -> Instant:
        now = self.time.monotonic_ns()
        return Instant(now, now, now, now - 5)


class Stage:
    def __init__(self, folder: Path) -> None:
        self.time = Time()
        self.path = str(folder / "h.db")
        self.kernel = Kernel(self.time)
        self.commits: list[int] = []
        self.open()

    def open(self) -> None:
        self.writer = HistoryWriter(self.path, "scripted", self.time.monotonic_ns(), None)
        commit = self.writer.commit

        def counted(covered: int) -> None:
            self.commits.append(covered)
            commit(covered)

        self.writer.commit = counted  # type: ignore[method-assign]
        self.follow()

    def follow(self, details: Any = None, modules: Any = None) -> None:
        """Have the stage's recorder follow these as well."""
        clock: Any = Clock(self.time)
        self.recorder = Recorder(
            self.kernel,
            self.writer,
            clock,
            details,
            modules,
            now=lambda: self.time.monotonic_ns(),
            sleep=lambda seconds: self.time.sleep(seconds),
        )

    def live(self) -> dict[int, int | None]:
        return {one.symbol.start: one.prog_id for one in self.recorder.timeline.live()}

    def truth(self) -> dict[int, int | None]:
        return {BASE + 0x400 * slot: held[1] for slot, held in self.kernel.held.items()}

    def snapshots(self) -> int:
        return self.kernel.calls.count("snapshot")

    def past(self) -> BootHistory:
        if hasattr(self, "history"):
            self.history.close()
        self.history = History(self.path)
        return self.history.recorded(self.history.boots()[0])


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    stage = Stage(tmp_path)
    yield stage
    stage.kernel.close()
    stage.writer._database.close()
    if hasattr(stage, "history"):
        stage.history.close()


def test_start_enumerates_then_reads_what_changed_meanwhile(stage: Stage) -> None:
    kernel = stage.kernel
    kernel.muted = True
    kernel.add(1)
    kernel.add(2)
    kernel.muted = False

    def meanwhile() -> None:
        kernel.remove(1)
        kernel.add(3)
        kernel.add(2)

    kernel.meanwhile = meanwhile
    stage.recorder.start()
    assert kernel.calls == ["snapshot", "read"]
    assert stage.live() == stage.truth()
    assert len(stage.commits) == 1
    stage.recorder.finish()
    past = stage.past()
    assert {one.symbol.start for one in past.live(past.sessions[0].covered)} == set(stage.truth())


def test_loss_is_made_good_by_a_resync_and_the_time_between_is_a_gap(stage: Stage) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    kernel.add(1)
    kernel.add(2)
    recorder.start()
    recorder.step()
    stage.time.now += SECOND
    since = stage.time.monotonic_ns()
    kernel.muted = True
    kernel.remove(1)
    kernel.add(2)
    kernel.add(4)
    lost_at = stage.time.monotonic_ns()
    kernel.muted = False
    kernel.lose(since)
    recorder.step()
    assert stage.live() == stage.truth()
    assert (recorder.tracker.losses, recorder.tracker.resyncs) == (1, 2)
    stage.time.now += SECOND
    after = stage.time.monotonic_ns()
    kernel.add(5)
    recorder.finish()
    past = stage.past()
    assert told(past.at(BASE + 0x400, since - 1)) == f"bpf_prog_{1:016x}_p {EXACT}"
    assert told(past.at(BASE + 0x400, lost_at)) == f"bpf_prog_{1:016x}_p {GAP}"
    assert told(past.at(BASE + 0x1000, after)) == f"bpf_prog_{4:016x}_p {EXACT}"
    assert told(past.at(BASE + 0x800, after)) == f"bpf_prog_{3:016x}_p {EXACT}"
    assert told(past.at(BASE + 0x800, since - 1)) == f"bpf_prog_{2:016x}_p {EXACT}"


def test_gap_stays_open_while_a_resync_fails(stage: Stage) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    kernel.add(1)
    recorder.start()
    recorder.step()
    covered = recorder.covered
    kernel.broken = True
    kernel.muted = True
    kernel.add(1)
    kernel.muted = False
    kernel.lose(covered)
    for _ in range(5):
        stage.time.now += SECOND // 2
        recorder.step()
    between = stage.time.monotonic_ns()
    recorder.step()
    assert recorder.covered < between
    assert stage.past().at(BASE + 0x400, between) == (None, OUTSIDE_HISTORY)
    kernel.lose(stage.time.monotonic_ns())
    recorder.step()
    kernel.broken = False
    stage.time.now += 2 * HEARTBEAT
    recorder.step()
    assert stage.live() == stage.truth()
    recorder.finish()
    answer = stage.past().at(BASE + 0x400, between)
    assert answer[0] is None or answer[1] == GAP
    assert stage.past().covers(between)


def test_session_that_ends_before_its_resync_ends_in_a_gap(stage: Stage) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    kernel.add(1)
    recorder.start()
    kernel.broken = True
    kernel.lose(recorder.covered)
    recorder.step()
    stage.time.now += 3 * SECOND
    recorder.finish()
    past = stage.past()
    assert told(past.at(BASE + 0x400, stage.time.now - SECOND)) == f"bpf_prog_{1:016x}_p {GAP}"


def test_a_resync_ends_what_is_hidden_under_others_too(stage: Stage) -> None:
    """Of three in one place no end was told; the last one over it is the only one live."""
    kernel, recorder = stage.kernel, stage.recorder
    recorder.start()
    for at, start in enumerate((BASE + 0x200, BASE + 0x100, BASE)):
        name = f"bpf_prog_{at:016x}_p"
        kernel.waiting.append(load(start, 0x180, name, stage.time.monotonic_ns(), 90 + at))
    recorder.step()
    stage.time.now += SECOND
    kernel.lose(stage.time.monotonic_ns())
    recorder.step()
    assert recorder.tracker.resyncs == 2
    assert stage.live() == {}
    recorder.finish()
    past = stage.past()
    assert past.live(past.sessions[-1].covered) == []


def test_who_was_followed_at_its_place_is_not_live_once_the_follower_is_gone(stage: Stage) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    recorder.start()
    kernel.add(1)
    kernel.muted = True
    kernel.remove(1)
    kernel.muted = False
    kernel.add(1)
    kernel.add(2)
    kernel.remove(1)
    recorder.step()
    stage.time.now += 10 * SECOND
    recorder.finish()
    past = stage.past()
    standing = past.live(past.sessions[-1].covered)
    assert [life.symbol.start for life in standing] == [BASE + 0x800]


def test_a_session_ends_with_the_kernel_s_table_even_while_a_resync_rests(stage: Stage) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    kernel.slowness = SECOND
    kernel.add(1)
    kernel.add(2)
    recorder.start()
    kernel.muted = True
    kernel.remove(1)
    kernel.add(2)
    kernel.add(3)
    kernel.muted = False
    lost_at = stage.time.monotonic_ns()
    kernel.lose(recorder.covered)
    recorder.step()
    assert recorder.tracker.resyncs == 1
    recorder.finish()
    assert stage.live() == stage.truth()
    past = stage.past()
    assert told(past.at(BASE + 0x400, lost_at)) == f"bpf_prog_{1:016x}_p {GAP}"
    end = past.sessions[-1].covered
    assert told(past.at(BASE + 0xC00, end)) == f"bpf_prog_{4:016x}_p {EXACT}"
    assert {one.symbol.start for one in past.live(end)} == set(stage.truth())


def test_repeated_losses_cost_a_bounded_share(stage: Stage) -> None:
    """A step each millisecond that loses each time, and snapshots of 10 ms: 10 in a second."""
    kernel, recorder = stage.kernel, stage.recorder
    kernel.slowness = 10_000_000
    recorder.start()
    began, before = stage.time.now, stage.snapshots()
    while stage.time.now < began + SECOND:
        kernel.lose(stage.time.now)
        recorder.step()
        assert recorder.wait_ms(stage.time.now, None) > 0
        stage.time.now += 1_000_000
    assert 5 <= stage.snapshots() - before <= 10


def test_commits_come_in_batches_and_at_the_least_at_each_heartbeat(stage: Stage) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    recorder.start()
    recorder.step()
    began, before = stage.time.now, len(stage.commits)
    while stage.time.now < began + 10 * SECOND:
        stage.time.now += 5_000_000
        recorder.step()
    assert len(stage.commits) - before == 10
    began, before = stage.time.now, len(stage.commits)
    while stage.time.now < began + 10 * SECOND:
        stage.time.now += 5_000_000
        kernel.add(stage.time.now % 7)
        recorder.step()
        assert stage.writer.pending < 100
    assert 40 <= len(stage.commits) - before <= 50
    assert stage.commits == sorted(stage.commits)
    recorder.finish()
    past = stage.past()
    assert len(past.lifetimes()) == kernel.last_id
    assert len(past.clock_map()._instants) == 4


def test_a_change_in_flight_during_a_drain_is_not_covered_by_it(stage: Stage) -> None:
    """Stamped before the drain, it comes with the next one, and nobody was told otherwise."""
    kernel, recorder = stage.kernel, stage.recorder
    recorder.start()
    stage.time.now += SECOND
    for in_flight in (1_000, 500_000):
        stage.time.now += SECOND
        kernel.add(1)
        late, kernel.waiting = kernel.waiting, []
        stage.time.now += in_flight
        recorder.step()
        assert recorder.covered < late[-1].latest
        kernel.waiting = late
        recorder.step()
        stage.time.now += 2_000_000
        recorder.step()
        assert recorder.covered > late[-1].latest
        assert stage.live() == stage.truth()


def test_finish_takes_in_what_is_in_flight_and_covers_the_time_until_then(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, recorder = stage.kernel, stage.recorder
    recorder.start()
    stage.time.now += SECOND
    kernel.add(1)
    late, kernel.waiting = kernel.waiting, []
    monkeypatch.setattr(stage.time, "asleep", lambda: kernel.waiting.extend(late))
    now = stage.time.monotonic_ns()
    recorder.finish()
    assert told(stage.past().at(BASE + 0x400, now)) == f"bpf_prog_{1:016x}_p {EXACT}"
