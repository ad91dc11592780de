"""Modules and BPF in one timeline, against a plain list of who held which bytes when."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    BETWEEN,
    BPF_PROG,
    EXACT,
    GRACE,
    LOST,
    MODULE,
    UNKNOWN_ADDRESS,
    VACANT,
    Frame,
    Load,
    Loss,
    Symbol,
    Unload,
)
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, told, unload

SECOND = 1_000_000_000
FUNCTIONS = PackedFunctions(pack_functions([(0, 0x40, "first"), (0x80, 0x1000, "second")]))


def module(start: int, size: int, name: str, time: int | tuple[int, int]) -> Load:
    earliest, latest = time if isinstance(time, tuple) else (time, time)
    symbol = Symbol(start, start + size, name, MODULE, name)
    return Load(symbol, earliest, latest, functions=FUNCTIONS)


class Held(NamedTuple):
    start: int
    end: int
    name: str
    loaded: int
    unloaded: int | None
    is_module: bool


STEP = st.tuples(
    st.sampled_from([0, 0x40, 0xFC0, 0x1000, 0x2000, 0x3F80]),
    st.sampled_from([0x40, 0x100, 0x1000, 0x2FC0, 0x9000, 0x12000]),
    st.booleans(),
    st.sampled_from([1, 5, 3 * SECOND]),
    st.sampled_from(["load", "load", "unload"]),
)


@st.composite
def pasts(draw: st.DrawFn) -> list[Held]:
    """What a kernel held, one after another: never two on one byte."""
    held: list[Held] = []
    now = 100
    for number, (offset, size, is_module, gap, what) in enumerate(
        draw(st.lists(STEP, max_size=12))
    ):
        start, end = BASE + offset, BASE + offset + size
        for at, other in enumerate(held):
            if other.unloaded is None and other.start < end and start < other.end:
                now += gap
                held[at] = other._replace(unloaded=now)
        if what == "load":
            now += gap
            name = f"mod_{number}" if is_module else f"bpf_prog_{number:016x}_p"
            held.append(Held(start, end, name, now, None, is_module))
    return held


def changes_of(held: list[Held]) -> list[Load | Unload]:
    changes: list[tuple[int, Load | Unload]] = []
    for one in held:
        size = one.end - one.start
        make = module if one.is_module else load
        changes.append((one.loaded, make(one.start, size, one.name, one.loaded)))
        if one.unloaded is not None:
            changes.append((one.unloaded, unload(one.start, one.unloaded, one.name)))
    return [change for _, change in sorted(changes, key=lambda pair: pair[0])]


def expected(held: list[Held], address: int, time: int) -> str | None:
    """Who surely had an address at a time, or None: nobody, or one that ran on."""
    there = [one for one in held if one.start <= address < one.end and one.loaded <= time]
    if not there:
        return None
    last = max(there, key=lambda one: one.loaded)
    if last.unloaded is None or time < last.unloaded:
        return last.name
    return None


@given(pasts(), st.randoms())
@settings(max_examples=300, deadline=None)
def test_who_was_there_is_who_the_kernel_had_there(held: list[Held], random: object) -> None:
    changes = changes_of(held)
    shuffled = list(changes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    edges = {edge for one in held for edge in (one.start, one.end)}
    times = {one.loaded for one in held} | {one.unloaded or 0 for one in held}
    for order in (changes, shuffled):
        timeline = Timeline()
        for change in order:
            timeline.apply(change)
        for address in {edge + step for edge in edges for step in (-1, 0, 1)}:
            for time in {instant + step for instant in times for step in (-1, 0, 1)}:
                lifetime, said = timeline.at(address, time)
                name = None if lifetime is None else lifetime.symbol.name
                truth = expected(held, address, time)
                if truth is not None:
                    assert (name, said) == (truth, EXACT), (hex(address), time)
                elif lifetime is not None:
                    # It ran on after its unload, or this is the instant of that.
                    is_module = lifetime.symbol.kind == MODULE
                    assert not is_module or time == lifetime.unloaded_latest
                    assert said is GRACE or time == lifetime.unloaded_latest


def test_nothing_runs_in_a_module_that_has_gone() -> None:
    timeline = Timeline()
    timeline.apply(module(BASE, 0x2000, "m", 100))
    timeline.apply(Unload(BASE, 200, 300, "m"))
    assert told(timeline.at(BASE + 0x1800, 250)) == "m exact"
    assert told(timeline.at(BASE + 0x1800, 301)) is VACANT


def test_one_that_followed_in_the_window_of_a_load_has_no_rival_in_one_that_has_gone() -> None:
    """A module is seen late, as its init ends: all of that time it had the place."""
    timeline = Timeline()
    timeline.apply(module(BASE, 0x2000, "old", 100))
    timeline.apply(Unload(BASE, 190, 200, "old"))
    timeline.apply(module(BASE, 0x2000, "new", (195, 900)))
    assert told(timeline.at(BASE + 4, 192)) == "old exact"
    assert timeline.at(BASE + 4, 198) == (None, AMBIGUOUS)
    assert told(timeline.at(BASE + 4, 201)) == "new exact"
    assert told(timeline.at(BASE + 4, 900)) == "new exact"


def test_a_program_that_took_the_place_has_it() -> None:
    timeline = Timeline()
    timeline.apply(module(BASE, 0x3000, "m", 100))
    timeline.apply(Unload(BASE, 200, 210, "m"))
    timeline.apply(load(BASE + 0x1000, 0x80, "bpf_prog_0000000000000001_p", 205, 1))
    resolver = Resolver(timeline)
    frame = resolver.resolve(BASE + 0x1004, 206)
    assert isinstance(frame, Frame)
    assert (frame.name, frame.kind) == ("bpf_prog_0000000000000001_p", BPF_PROG)
    before = resolver.resolve(BASE + 0x1004, 199)
    assert isinstance(before, Frame)
    assert (before.name, before.offset, before.module, before.kind) == (
        "second",
        0x1004 - 0x80,
        "m",
        MODULE,
    )
    assert before.lifetime is timeline.started_at(BASE)[0]


def test_between_two_functions_there_is_no_name() -> None:
    timeline = Timeline()
    timeline.apply(module(BASE, 0x1080, "m", 100))
    resolver = Resolver(timeline)
    for offset, name in ((0x3F, "first"), (0x40, None), (0x7F, None), (0x80, "second")):
        frame = resolver.resolve(BASE + offset, 100)
        assert (frame.name if isinstance(frame, Frame) else None) == name
        assert isinstance(frame, Frame) or frame is BETWEEN
    assert resolver.resolve(BASE + 0x2000, 100) is UNKNOWN_ADDRESS


def test_reports_of_bpf_end_no_module() -> None:
    timeline = Timeline()
    timeline.apply(module(BASE, 0x1000, "m", (100, 200)))
    timeline.apply(Unload(BASE, 300, 300))
    timeline.apply(Unload(BASE, 300, 300, "[bpf: name unknown]"))
    timeline.apply(Unload(BASE, 300, 300, "bpf_prog_0000000000000001_p", 1))
    assert told(timeline.at(BASE + 4, 400)) == "m exact"


def test_a_loss_makes_modules_uncertain() -> None:
    timeline = Timeline()
    timeline.apply(module(BASE, 0x1000, "m", 100))
    timeline.apply(Loss(150, 160, "test"))
    timeline.apply(Unload(BASE, 300, 300, "m"))
    timeline.apply(Loss(400, 410, "test"))
    assert told(timeline.at(BASE + 4, 155)) == "m gap"
    assert timeline.at(BASE + 4, 405) == (None, LOST)


def test_what_ended_is_expired_and_its_ground_asked_again() -> None:
    timeline = Timeline()
    timeline.apply(module(BASE, 0x9000, "m", 100))
    timeline.apply(module(BASE + 0x10000, 0x9000, "n", 100))
    timeline.apply(Unload(BASE, 300, 300, "m"))
    extent = timeline.extent
    timeline.expire(400)
    assert [life.symbol.name for life in timeline.lifetimes()] == ["n"]
    assert timeline.extent > extent
    assert timeline.at(BASE, 200) == (None, UNKNOWN_ADDRESS)
    assert told(timeline.at(BASE + 0x18FFF, 200)) == "n exact"


def test_what_came_and_went_within_one_window_had_the_place_for_all_of_it() -> None:
    """As code for an init that is over when it is first looked at."""
    timeline = Timeline()
    timeline.apply(module(BASE, 0x1000, "m", (100, 200)))
    timeline.apply(Unload(BASE, 100, 200, "m"))
    assert [told(timeline.at(BASE + 4, time)) for time in (100, 150, 200)] == ["m exact"] * 3
    assert timeline.at(BASE + 4, 99) == (None, VACANT)
    assert timeline.at(BASE + 4, 201) == (None, VACANT)


def test_who_was_surely_there_still_has_no_rival_in_what_followed() -> None:
    """A window begins when the list was read without the module: its place was another's."""
    timeline = Timeline()
    timeline.apply(load(BASE, 64, "bpf_prog_0000000000000001_p", 100, 1))
    timeline.apply(unload(BASE, 500, "bpf_prog_0000000000000001_p", 1))
    timeline.apply(module(BASE, 0x1000, "m", (200, 900)))
    assert told(timeline.at(BASE + 4, 300)) == "bpf_prog_0000000000000001_p exact"
    assert told(timeline.at(BASE + 4, 499)) == "bpf_prog_0000000000000001_p exact"
    # It may be running on, as nobody knows when the module came.
    assert timeline.at(BASE + 4, 600) == (None, AMBIGUOUS)
    assert told(timeline.at(BASE + 4, 900)) == "m exact"
