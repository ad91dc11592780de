"""The tracker over a kernel made of a dict, against what that kernel really held when."""

from __future__ import annotations

import contextlib
from typing import Callable, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import EXACT, GAP, LOST, Load, Loss, Unload
from ksym_plugin.timeline.tracker import MEMORY_COUNT, MEMORY_SPAN, Tracker, Update
from tests.unit.helpers import BASE, load, told, unload

SECOND = 1_000_000_000
SLOTS = 5


class Held(NamedTuple):
    """Who had a slot, by the kernel itself; ``until`` is None while it has it."""

    name: str
    prog_id: int
    since: int
    until: int | None


class Kernel:
    """Tells of its changes, unless it is ``muted``: then it tells of the loss afterwards."""

    lists_images = False

    def __init__(self) -> None:
        self.now = 1000 * SECOND
        self.slots: list[list[Held]] = [[] for _ in range(SLOTS)]
        self.waiting: list[Load | Unload | Loss] = []
        self.muted_since: int | None = None
        self.broken = False
        self.calls: list[str] = []
        self.lost: list[tuple[int, int]] = []
        self.slowness = 1000
        self.meanwhile: Callable[[], object] = lambda: None
        self.last_id = 0

    def clock(self) -> int:
        self.now += 1000
        return self.now

    def holder(self, slot: int) -> Held | None:
        last = self.slots[slot][-1:]
        return last[0] if last and last[0].until is None else None

    def add(self, slot: int) -> None:
        self.remove(slot)
        self.last_id += 1
        held = Held(f"bpf_prog_{self.last_id:016x}_p", self.last_id, self.clock(), None)
        self.slots[slot].append(held)
        self._tell(load(place(slot), 0x300, held.name, held.since, held.prog_id))

    def remove(self, slot: int) -> None:
        held = self.holder(slot)
        if held is not None:
            now = self.clock()
            self.slots[slot][-1] = held._replace(until=now)
            self._tell(unload(place(slot), now, held.name, held.prog_id))

    def mute(self, _: int) -> None:
        self.muted_since = self.muted_since or self.clock()

    def unmute(self, _: int = 0) -> None:
        if self.muted_since is not None:
            loss = Loss(self.muted_since, self.clock(), "scripted", 1)
            self.lost.append((loss.since, loss.until))
            self.waiting.append(loss)
            self.muted_since = None

    def _tell(self, change: Load | Unload) -> None:
        if self.muted_since is None:
            self.waiting.append(change)

    def read(self) -> list[Load | Unload | Loss]:
        self.calls.append("read")
        waiting, self.waiting = self.waiting, []
        return waiting

    def snapshot(self) -> list[Load]:
        self.calls.append("snapshot")
        if self.broken:
            raise SourceError("the kernel does not tell")
        holders = [(slot, self.holder(slot)) for slot in range(SLOTS)]
        self.meanwhile()
        self.now += self.slowness
        now = self.clock()
        return [
            load(place(slot), 0x300, held.name, (held.since, now), held.prog_id)
            for slot, held in holders
            if held is not None
        ]


def place(slot: int) -> int:
    return BASE + 0x400 * slot


class Stage:
    def __init__(self) -> None:
        self.kernel = Kernel()
        self.updates: list[Update] = []
        self.tracker = Tracker(self.kernel.clock, self.updates.append, contextlib.nullcontext())

    def step(self, _: int = 0) -> None:
        """As whoever drives one does it."""
        self.tracker.read(self.kernel)
        if self.tracker.is_resync_due(self.kernel.clock()):
            self.tracker.resync(self.kernel)

    def live(self) -> dict[int, int | None]:
        return {one.symbol.start: one.prog_id for one in self.tracker.timeline.live()}

    def truth(self) -> dict[int, int | None]:
        holders = {place(slot): self.kernel.holder(slot) for slot in range(SLOTS)}
        return {start: held.prog_id for start, held in holders.items() if held is not None}


@pytest.fixture
def stage() -> Stage:
    return Stage()


STEP = st.tuples(
    st.sampled_from("add add add remove mute unmute step step step break wait".split()),
    st.integers(0, SLOTS - 1),
)
CHANGE = st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, SLOTS - 1))


def play(stage: Stage, what: str, slot: int) -> None:
    kernel = stage.kernel
    if what == "break":
        kernel.broken = not kernel.broken
    elif what == "wait":
        kernel.now += SECOND
    elif what == "step":
        stage.step()
    else:
        getattr(kernel, what)(slot)


@given(st.lists(STEP, max_size=40), st.lists(CHANGE, max_size=3))
@settings(max_examples=150)
def test_outside_gaps_the_answers_are_what_the_kernel_held(steps: list, meanwhile: list) -> None:
    stage = Stage()
    kernel, tracker = stage.kernel, stage.tracker
    kernel.meanwhile = lambda: [play(stage, *each) for each in meanwhile]
    tracker.resync(kernel)
    began = kernel.clock()
    for each in steps:
        play(stage, *each)
    kernel.meanwhile = lambda: None
    kernel.broken = False
    kernel.unmute()
    kernel.now += 60 * SECOND
    stage.step()
    assert stage.live() == stage.truth()
    assert tracker.lost is None
    check_windows(stage)
    gaps = [(loss.since, loss.until) for update in stage.updates for loss in update.losses]
    for since, until in kernel.lost:
        assert any(low <= since and until <= high for low, high in gaps)
    edges = [edge for slot in kernel.slots for held in slot for edge in (held.since, held.until)]
    for edge in [*edges, *(edge for gap in gaps for edge in gap), kernel.now]:
        for at in (edge or 0) - 1, (edge or 0) + 1:
            if at > began:
                check(stage, at, any(since <= at <= until for since, until in gaps))


def check_windows(stage: Stage) -> None:
    """What happened unseen lies within the window in which it is said to have happened."""
    truth = {held.prog_id: held for slot in stage.kernel.slots for held in slot}
    for one in stage.tracker.timeline.lifetimes():
        held = truth[one.prog_id or 0]
        assert one.loaded_earliest <= held.since <= one.loaded_latest
        if one.unloaded_latest is not None:
            assert (one.unloaded_earliest or 0) <= (held.until or 0) <= one.unloaded_latest


def check(stage: Stage, at: int, is_gap: bool) -> None:
    """Who held each slot has it for certain, where nothing was lost, and nowhere else."""
    for slot, ever in enumerate(stage.kernel.slots):
        lifetime, said = stage.tracker.timeline.at(place(slot), at)
        held = [one for one in ever if one.since <= at and (one.until is None or at < one.until)]
        if is_gap:
            assert said != EXACT, (slot, at)
        elif held:
            assert (lifetime and lifetime.prog_id, said) == (held[0].prog_id, EXACT)
        else:
            assert lifetime is None or said != EXACT, (slot, at)


def test_the_start_enumerates_and_then_reads_what_changed_meanwhile(stage: Stage) -> None:
    kernel = stage.kernel
    kernel.add(1)
    kernel.add(2)
    kernel.waiting.clear()

    def meanwhile() -> None:
        kernel.remove(1)
        kernel.add(3)
        kernel.add(2)

    kernel.meanwhile = meanwhile
    stage.tracker.resync(kernel)
    assert kernel.calls == ["snapshot", "read"]
    assert stage.live() == stage.truth()


def test_a_start_without_a_snapshot_raises(stage: Stage) -> None:
    stage.kernel.broken = True
    with pytest.raises(SourceError):
        stage.tracker.resync(stage.kernel)


def test_a_resync_that_fails_is_tried_again_and_the_gap_lasts_until_then(stage: Stage) -> None:
    kernel, tracker = stage.kernel, stage.tracker
    tracker.resync(kernel)
    kernel.mute(0)
    kernel.add(1)
    kernel.unmute()
    kernel.broken = True
    for _ in range(5):
        kernel.now += SECOND // 2
        stage.step()
    between = kernel.clock()
    assert kernel.calls.count("snapshot") <= 4
    assert tracker.lost is not None and tracker.lost.until < between
    kernel.broken = False
    kernel.now += 2 * SECOND
    stage.step()
    assert tracker.lost is None
    assert stage.live() == stage.truth()
    assert tracker.timeline.at(place(1), between)[1] in (GAP, LOST) or (
        tracker.timeline.lost_between(between, between)
    )


def test_repeated_losses_cost_a_bounded_share(stage: Stage) -> None:
    """A step each millisecond that loses each time, and snapshots of 10 ms: 10 in a second."""
    kernel = stage.kernel
    kernel.slowness = 10_000_000
    stage.tracker.resync(kernel)
    began, before = kernel.now, kernel.calls.count("snapshot")
    while kernel.now < began + SECOND:
        kernel.mute(0)
        kernel.unmute()
        stage.step()
        kernel.now += 1_000_000
    assert 5 <= kernel.calls.count("snapshot") - before <= 10


@pytest.mark.parametrize("listed", [True, False])
def test_the_last_image_to_go_is_gone_where_images_are_listed(stage: Stage, listed: bool) -> None:
    """And where BPF may be hidden from kallsyms, that it is not there says nothing."""
    kernel = stage.kernel
    stage.tracker.resync(kernel)
    kernel.add(1)
    start = BASE + 0x10000
    kernel.waiting.append(load(start, 4096, "bpf_trampoline_6442", kernel.clock(), None, True))
    stage.step()
    kernel.now += SECOND
    kernel.lists_images = listed
    kernel.mute(0)
    kernel.unmute()
    stage.step()
    assert stage.tracker.resyncs == 2
    assert (start in stage.live()) == (not listed)
    assert place(1) in stage.live()


def test_a_resync_ends_what_is_hidden_under_others_too(stage: Stage) -> None:
    """Of three in one place no end was told; the last one over it is the only one live."""
    kernel = stage.kernel
    stage.tracker.resync(kernel)
    for at, start in enumerate((BASE + 0x200, BASE + 0x100, BASE)):
        name = f"bpf_prog_{at:016x}_p"
        kernel.waiting.append(load(start, 0x180, name, kernel.clock(), 90 + at))
    stage.step()
    kernel.now += SECOND
    kernel.mute(0)
    kernel.unmute()
    stage.step()
    assert stage.tracker.resyncs == 2
    assert stage.live() == {}


def test_doubt_is_a_loss_from_then_on(stage: Stage) -> None:
    kernel, tracker = stage.kernel, stage.tracker
    kernel.add(1)
    tracker.resync(kernel)
    since = tracker.covered
    tracker.lose_track(since)
    kernel.waiting.clear()
    kernel.now += SECOND
    between = kernel.clock()
    tracker.resync(kernel)
    assert told(tracker.timeline.at(place(1), between)) == f"bpf_prog_{1:016x}_p {GAP}"
    assert told(tracker.timeline.at(place(1), kernel.clock())) == f"bpf_prog_{1:016x}_p {EXACT}"


def test_memory_is_bounded_and_what_was_forgotten_is_a_gap(stage: Stage) -> None:
    kernel, tracker = stage.kernel, stage.tracker
    tracker.resync(kernel)
    first = kernel.now
    for _ in range(MEMORY_COUNT + 1):
        kernel.add(1)
    tracker.read(kernel)
    kernel.now += 2 * MEMORY_SPAN
    tracker.forget(kernel.now)
    assert tracker.timeline.count == 1
    assert tracker.timeline.lost_between(first, first)
    assert stage.live() == stage.truth()


def test_what_is_no_change_is_refused(stage: Stage) -> None:
    with pytest.raises(TypeError, match="is no change"):
        stage.tracker.apply(["load"])  # type: ignore[list-item]
