"""The timeline against a brute-force model, and the answers that misled other tools."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    EXACT,
    GRACE,
    NOT_LOADED,
    UNKNOWN_ADDRESS,
    Load,
    Unload,
)
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import (
    BASE,
    Held,
    changes_of,
    histories,
    load,
    questions,
    row_of,
    timeline_of,
    told,
    unload,
)

#: In ns: after it nobody is still running what was unloaded.
GRACE_SPAN = 2_000_000_000


def last_loaded(held: list[Held], address: int, time: int) -> Held | None:
    over = [one for one in held if one.loaded <= time and one.start <= address < one.end]
    return max(over, key=lambda one: one.loaded, default=None)


def check_exact(timeline: Timeline, held: list[Held], address: int, time: int) -> None:
    """The rule, worked out anew: the last symbol loaded over an address has it."""
    lifetime, said = timeline.at(address, time)
    expected = last_loaded(held, address, time)
    where = f"{address:#x} at {time}: {lifetime} {said}, should be {expected}"
    if expected is None:
        assert lifetime is None, where
        near = any(abs((one.start >> 21) - (address >> 21)) <= 1 for one in held)
        assert said in (NOT_LOADED, AMONG_BPF if near else UNKNOWN_ADDRESS), where
        return
    over = [
        other
        for other in held
        if other.overlaps(expected) and expected.loaded < other.loaded <= time
    ]
    if over:
        # Another has taken a part of it, if not this byte: nobody is here for certain,
        # and who has lost his start to what is still whole has lost all.
        assert lifetime is None or said == GRACE, where
        newest = max(over, key=lambda other: other.loaded)
        whole = not any(
            other.overlaps(newest) and newest.loaded < other.loaded <= time for other in held
        )
        if whole and newest.start <= expected.start < newest.end:
            assert lifetime is None or lifetime.loaded_latest != expected.loaded, where
        return
    ended = expected.unloaded is not None and time > expected.unloaded
    if expected.unloaded is not None and time > expected.unloaded + GRACE_SPAN:
        assert told((lifetime, said)) is NOT_LOADED, where
        return
    assert lifetime is not None, where
    assert (lifetime.symbol.start, lifetime.symbol.name) == (expected.start, expected.name), where
    assert lifetime.loaded_latest == expected.loaded, where
    assert said == (GRACE if ended else EXACT), where


@given(histories())
@settings(max_examples=100, deadline=None)
def test_at_equals_brute_force(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    for address, time in questions(held):
        check_exact(timeline, held, address, time)


@given(histories())
@settings(max_examples=100, deadline=None)
def test_live_equals_brute_force(held: list[Held]) -> None:
    live = timeline_of(*changes_of(held)).live()
    expected = sorted((one.start, one.name, one.loaded) for one in held if one.unloaded is None)
    assert [(one.symbol.start, one.symbol.name, one.loaded_latest) for one in live] == expected


@given(histories(), st.data())
@settings(max_examples=100, deadline=None)
def test_symbol_whose_unload_was_lost_ends_where_the_next_begins(
    held: list[Held], data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.integers(0, len(held))))
    partly = [one if at in kept else one._replace(unloaded=None) for at, one in enumerate(held)]
    timeline = timeline_of(*changes_of(partly))
    for address, time in questions(held):
        there = next((one for one in held if one.holds(address, time)), None)
        lifetime, said = timeline.at(address, time)
        if there is not None:
            assert lifetime is not None
            assert said == EXACT
            assert (lifetime.symbol.start, lifetime.loaded_latest) == (there.start, there.loaded)
    standing = {
        one.start
        for one in partly
        if one.unloaded is None
        and not any(
            other.start <= one.start < other.end and other.loaded > one.loaded for other in held
        )
    }
    # A dead symbol above a lost one has ended it, whether or not it is dead itself.
    live = {one.symbol.start for one in timeline.live()}
    truly = {one.start for one in held if one.unloaded is None}
    assert truly <= live
    assert standing <= live | truly


@given(histories())
@settings(max_examples=100, deadline=None)
def test_no_two_lifetimes_cover_one_address_at_one_instant(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    for address, time in questions(held):
        covering = [
            lifetime
            for lifetime in timeline.lifetimes()
            if lifetime.symbol.start <= address < lifetime.symbol.end
            and lifetime.loaded_latest <= time
            and (lifetime.unloaded_latest is None or time < lifetime.unloaded_latest)
        ]
        assert len(covering) <= 1


Image = tuple


def image_of(timeline: Timeline, held: list[Held]) -> Image:
    """All a timeline says, to compare two of them by."""
    answers = [
        (address, time, said if lifetime is None else (row_of(lifetime), said))
        for address, time in questions(held)
        for lifetime, said in [timeline.at(address, time)]
    ]
    return (
        answers,
        [row_of(lifetime) for lifetime in timeline.live()],
        [row_of(lifetime) for lifetime in timeline.lifetimes()],
    )


@given(histories(images=True), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_any_order_of_arrival_ends_in_the_same_answers(
    held: list[Held], with_names: bool, chance: random.Random
) -> None:
    changes = changes_of(held, with_names)
    expected = image_of(timeline_of(*changes), held)
    chance.shuffle(changes)
    assert image_of(timeline_of(*changes), held) == expected


@given(histories(images=True), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_reports_a_few_places_late_end_in_the_same_answers(
    held: list[Held], with_names: bool, chance: random.Random
) -> None:
    changes = changes_of(held, with_names)
    expected = image_of(timeline_of(*changes), held)
    places = [at + chance.random() * 4 for at in range(len(changes))]
    late = [changes[at] for at in sorted(range(len(changes)), key=places.__getitem__)]
    assert image_of(timeline_of(*late), held) == expected


@given(histories(images=True), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_report_that_came_twice_is_one_lifetime(held: list[Held], chance: random.Random) -> None:
    """Every program found by a snapshot as well, in any order; known by id."""
    held = [one._replace(prog_id=at + 1) for at, one in enumerate(held)]
    changes = changes_of(held)
    expected = image_of(timeline_of(*changes), held)
    doubled: list[Load | Unload] = list(changes)
    for one in held:
        # The snapshot may be complete only after the unload, or after the next load.
        window = (one.loaded - chance.randrange(60), one.loaded + chance.randrange(60))
        size = one.reported_end - one.start
        doubled.append(load(one.start, size, one.name, window, one.prog_id, one.is_image))
        if one.unloaded:
            window = (one.loaded, one.unloaded + chance.randrange(60))
            doubled.append(unload(one.start, window, one.name, one.prog_id))
    chance.shuffle(doubled)
    assert image_of(timeline_of(*doubled), held) == expected


@given(histories(images=True), st.integers(0, 0x2000), st.integers(0, 1 << 40))
@settings(max_examples=100, deadline=None)
def test_unload_that_matches_nothing_changes_nothing(
    held: list[Held], offset: int, time: int
) -> None:
    changes = changes_of(held)
    expected = image_of(timeline_of(*changes), held)
    starts = {one.start for one in held}
    if BASE + offset not in starts:
        strange = [unload(BASE + offset, time)]
    else:
        strange = [unload(BASE + offset, time, "bpf_prog_ffffffffffffffff_other")]
    assert image_of(timeline_of(*changes, *strange), held) == expected


def test_length_0_covers_nothing_and_its_unload_ends_nothing() -> None:
    there = load(BASE, 64, "bpf_prog_0000000000000001_a", 10)
    timeline = timeline_of(there, load(BASE, 0, "bpf_prog_0000000000000002_b", 20))
    assert told(timeline.at(BASE, 25)) == "bpf_prog_0000000000000001_a exact"
    timeline.apply(unload(BASE, 30, "bpf_prog_0000000000000002_b"))
    assert told(timeline.at(BASE, 35)) == "bpf_prog_0000000000000001_a exact"
    assert timeline.count == 1
    assert timeline_of(load(BASE, 0, "x", 1)).at(BASE, 2) == (None, UNKNOWN_ADDRESS)


def test_ambiguous_is_never_a_guess() -> None:
    first = load(BASE, 64, "bpf_prog_0000000000000001_a", 10)
    second = load(BASE, 64, "bpf_prog_0000000000000002_b", (20, 30))
    timeline = timeline_of(first, unload(BASE, (18, 25)), second)
    said = {time: told(timeline.at(BASE, time)) for time in (9, 10, 18, 19, 20, 30, 31)}
    assert said == {
        9: NOT_LOADED,
        10: "bpf_prog_0000000000000001_a exact",
        18: "bpf_prog_0000000000000001_a exact",
        19: "bpf_prog_0000000000000001_a exact",
        20: AMBIGUOUS,
        30: "bpf_prog_0000000000000002_b exact",
        31: "bpf_prog_0000000000000002_b exact",
    }


def test_grace_ends_although_nothing_took_the_place() -> None:
    """What takes a place unannounced (classic BPF, a module) is not given a dead name."""
    timeline = timeline_of(load(BASE, 64, "bpf_prog_0000000000000001_a", 10), unload(BASE, 20))
    assert told(timeline.at(BASE, 20 + GRACE_SPAN)) == "bpf_prog_0000000000000001_a grace"
    assert told(timeline.at(BASE, 21 + GRACE_SPAN)) is NOT_LOADED


def test_who_was_overrun_is_not_there_when_the_next_has_gone_as_well() -> None:
    """Whoever took the place has been taken a part of, and shares no byte with the first."""
    timeline = timeline_of(
        load(BASE + 0x40, 4, "first", 106),
        unload(BASE + 0x40, 108, "first"),
        load(BASE, 0x2BC, "second", 109),
        unload(BASE, 110, "second"),
        load(BASE + 0x1C0, 0x40, "third", 111),
    )
    assert told(timeline.at(BASE + 0x40, 108)) == "first exact"
    assert told(timeline.at(BASE + 0x40, 109)) == "second exact"
    assert told(timeline.at(BASE + 0x40, 111)) is NOT_LOADED
