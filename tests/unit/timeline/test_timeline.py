"""The timeline against brute-force models, and the answers that misled other tools."""

from __future__ import annotations

import os
import random
import sys
from bisect import bisect_left
from itertools import groupby
from operator import itemgetter
from types import FrameType
from typing import Any, Callable, NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ksym_plugin
from ksym_plugin.timeline import index
from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    BETWEEN,
    BPF_PROG,
    EXACT,
    GAP,
    GRACE,
    LOST,
    MODULE,
    NOT_LOADED,
    UNKNOWN_ADDRESS,
    VACANT,
    Frame,
    Load,
    Loss,
    Symbol,
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

# Exact times: who was there, in whatever order the changes arrive.

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
        # Another has taken a part of it, if not this byte: it cannot run any more.
        assert lifetime is None, where
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
@settings(max_examples=100)
def test_at_equals_brute_force(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    for address, time in questions(held):
        check_exact(timeline, held, address, time)


@given(histories(images=True))
@settings(max_examples=60)
def test_names_since_a_time_are_those_of_all_that_can_have_run(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    for address, since in questions(held):
        there = [one for one in held if one.start <= address < one.end]
        surely = {one.name for one in there if one.unloaded is None or one.unloaded > since}
        reported = [one for one in held if one.start <= address < one.reported_end]
        perhaps = {
            one.name
            for one in reported
            if one.unloaded is None or one.unloaded + GRACE_SPAN >= since
        }
        assert surely <= timeline.names_since(address, since) <= perhaps


@given(histories())
@settings(max_examples=100)
def test_live_equals_brute_force(held: list[Held]) -> None:
    live = timeline_of(*changes_of(held)).live()
    expected = sorted((one.start, one.name, one.loaded) for one in held if one.unloaded is None)
    assert [(one.symbol.start, one.symbol.name, one.loaded_latest) for one in live] == expected


@given(histories(), st.data())
@settings(max_examples=100)
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
@settings(max_examples=100)
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
    rows = {lifetime: row_of(lifetime) for lifetime in timeline.lifetimes()}
    answers = [
        (address, time, said if lifetime is None else (rows[lifetime], said))
        for address, time in questions(held)
        for lifetime, said in [timeline.at(address, time)]
    ]
    return (
        answers,
        [row_of(lifetime) for lifetime in timeline.live()],
        [row_of(lifetime) for lifetime in timeline.lifetimes()],
    )


@given(histories(images=True), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=120)
def test_any_order_of_arrival_ends_in_the_same_answers(
    held: list[Held], with_names: bool, chance: random.Random
) -> None:
    changes = changes_of(held, with_names)
    expected = image_of(timeline_of(*changes), held)
    chance.shuffle(changes)
    assert image_of(timeline_of(*changes), held) == expected


@given(histories(images=True), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_reports_a_few_places_late_end_in_the_same_answers(
    held: list[Held], with_names: bool, chance: random.Random
) -> None:
    changes = changes_of(held, with_names)
    expected = image_of(timeline_of(*changes), held)
    places = [at + chance.random() * 4 for at in range(len(changes))]
    late = [changes[at] for at in sorted(range(len(changes)), key=places.__getitem__)]
    assert image_of(timeline_of(*late), held) == expected


@given(histories(images=True), st.randoms(use_true_random=False))
@settings(max_examples=100)
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
@settings(max_examples=100)
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


@pytest.mark.parametrize(
    ("start", "end", "is_open"),
    [
        (0x1100, 0x1180, False),
        (0x1180, 0x1240, False),
        (0x1000, 0x1040, False),
        (0xFC0, 0x1001, False),
        (0x11FF, 0x1240, False),
        (0x1180, 0x2180, True),
        (0x800, 0x9_1000, False),
    ],
)
def test_memory_that_was_partly_given_away_runs_nothing_of_before(
    start: int, end: int, is_open: bool
) -> None:
    base, second = BASE - 0x1000, 1_000_000_000
    name = "bpf_trampoline_6442500001" if is_open else "bpf_prog_00000000000000bb_y"
    changes = [
        load(base + 0x1000, 0x200, "bpf_prog_00000000000000aa_x", second),
        unload(base + 0x1000, 2 * second),
        load(base + start, end - start, name, 2 * second + 10_000_000, None, is_open),
        unload(base + start, 2 * second + 15_000_000),
    ]
    timeline = timeline_of(*changes)
    for address in (0x1050, 0x10FF, 0x11F0):
        before = timeline.at(base + address, 2 * second + 5_000_000)
        assert told(before) == "bpf_prog_00000000000000aa_x grace"
        lifetime, said = timeline.at(base + address, 2 * second + 20_000_000)
        if start <= address < end:
            assert told((lifetime, said)) == f"{name} grace"
        else:
            assert (lifetime, said) == (None, NOT_LOADED)


@pytest.mark.parametrize("neighbour", [0xFC0, 0x1200])
def test_what_comes_next_to_it_takes_nothing_of_it(neighbour: int) -> None:
    base = BASE - 0x1000
    timeline = timeline_of(
        load(base + 0x1000, 0x200, "bpf_prog_00000000000000aa_x", 10),
        unload(base + 0x1000, 20),
        load(base + neighbour, 0x40, "bpf_prog_00000000000000bb_y", 30),
    )
    for address in (0x1000, 0x1050, 0x11FF):
        assert told(timeline.at(base + address, 40)) == "bpf_prog_00000000000000aa_x grace"


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_an_area_is_as_large_as_there_are_nodes(nodes: int) -> None:
    """BPF_PROG_PACK_SIZE is so many times 2 MB, from any page on."""
    timeline = timeline_of(load(BASE, 64, "bpf_prog_0000000000000001_a", 10))
    timeline.nodes = nodes
    size = nodes << 21
    for address in (BASE - size + 4096, BASE + 4096, BASE + size - 4096):
        assert timeline.at(address, 20) == (None, AMONG_BPF)
    for address in (BASE - size - (2 << 21), BASE + size + (2 << 21)):
        assert timeline.at(address, 20) == (None, UNKNOWN_ADDRESS)


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


# Chunks in which very many symbols started, one after another.

_STEP = st.tuples(
    st.integers(0, 24),  # where it starts, in steps of four bytes
    st.sampled_from([4, 12, 40, 64, 100, 300, 700]),
    st.integers(0, 2),  # name
    st.sampled_from([0, 0, 3, 90]),  # how wide the windows of its reports are
)


@st.composite
def crowds(draw: st.DrawFn, exact: bool) -> list[Held]:
    """One symbol at a time, all of them starting within two chunks."""
    held: list[Held] = []
    now = 1_000
    for at, size, name, width in draw(st.lists(_STEP, min_size=16, max_size=40)):
        start = BASE + 4 * at
        end = start + size
        gap = 1 if exact else 1 + width
        title = f"bpf_prog_{name:016x}_p"
        held.append(Held(start, end, title, now, now + gap, None, end))
        now += 2 * gap
    return held


def check_crowd(timeline: Timeline, held: list[Held]) -> None:
    by_time = itemgetter(1)
    for time, asked in groupby(sorted(questions(held), key=by_time), by_time):
        loaded = [one for one in held if one.holds(one.start, time)]
        for address, _ in asked:
            check_in_crowd(timeline, loaded, address, time)


def check_in_crowd(timeline: Timeline, loaded: list[Held], address: int, time: int) -> None:
    there = [one for one in loaded if one.holds(address, time)]
    lifetime, said = timeline.at(address, time)
    if there and said is not AMBIGUOUS:
        assert lifetime is not None
        assert (lifetime.symbol.name, said) == (there[0].name, EXACT)
    elif lifetime is not None:
        # On the very instant of its unload it is still there.
        assert said == GRACE or (lifetime.unloaded_latest or 0) >= time
        assert lifetime.loaded_earliest <= time


@given(crowds(exact=True))
@settings(max_examples=30)
def test_who_was_there_is_found_among_many(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    check_crowd(timeline, held)
    assert all(timeline.at(one.start, one.loaded)[1] is not AMBIGUOUS for one in held)


@given(crowds(exact=False), st.data())
@settings(max_examples=30)
def test_in_windows_among_many_a_name_is_right_or_not_given(
    held: list[Held], data: st.DataObject
) -> None:
    changes: list[Load | Unload] = []
    for one in held:
        width = data.draw(st.sampled_from([0, 1, 50]))
        assert one.unloaded is not None
        changes.append(
            load(one.start, one.end - one.start, one.name, (one.loaded - width, one.loaded))
        )
        changes.append(unload(one.start, (one.unloaded, one.unloaded + width), one.name))
    check_crowd(timeline_of(*changes), held)


def test_a_symbol_at_the_start_of_a_chunk_is_found_behind_many() -> None:
    changes: list[Load | Unload] = [load(BASE, 4, "old", 10)]
    for turn in range(100):
        at = BASE + 8 + 4 * (turn % 12)
        changes += [load(at, 100, f"new{turn}", 100 + 2 * turn), unload(at, 101 + 2 * turn)]
    timeline = timeline_of(*changes)
    lifetime, said = timeline.at(BASE + 2, 5_000)
    assert lifetime is not None
    assert (lifetime.symbol.name, said) == ("old", EXACT)


# Symbols that are wide, as modules are, among those that are not.


@given(histories(), st.sampled_from([1, 60, 100, 300]))
def test_who_was_there_does_not_depend_on_what_counts_as_wide(held: list[Held], wide: int) -> None:
    with mock.patch.object(index, "WIDE", wide):
        timeline = timeline_of(*changes_of(held))
        for address, time in questions(held):
            check_exact(timeline, held, address, time)


@given(histories(images=True), st.sampled_from([1, 60, 100, 300]))
def test_answers_beside_open_ends_hardly_depend_on_what_counts_as_wide(
    held: list[Held], wide: int
) -> None:
    usual = timeline_of(*changes_of(held))
    with mock.patch.object(index, "WIDE", wide):
        timeline = timeline_of(*changes_of(held))
        for address, time in questions(held):
            there, said = timeline.at(address, time)
            expected, meant = usual.at(address, time)
            # Of what has lost a part since its unload more may be seen to have left, which
            # may leave the place to an image or make a doubt of it.
            if said == meant:
                assert (there and there.symbol) == (expected and expected.symbol)
            elif there is not None and expected is not None:
                assert there.symbol == expected.symbol


def test_a_program_takes_a_part_of_what_a_module_left() -> None:
    size = 4 << 20
    middle = BASE + (size >> 1)
    timeline = timeline_of(
        load(BASE, size, "big", 10),
        unload(BASE, 20),
        load(middle, 100, "small", 30),
    )
    assert timeline.at(middle + 200, 15)[1] == EXACT
    there, said = timeline.at(middle + 50, 40)
    assert there is not None
    assert (there.symbol.name, said) == ("small", EXACT)
    assert timeline.at(middle + 200, 25 + 2 * 10**9)[1] is NOT_LOADED
    assert timeline.at(BASE + 2 * size, 15)[1] is UNKNOWN_ADDRESS
    # What has a page for its grain has no more than that.
    assert timeline.extent < 1100


def test_a_report_that_narrows_a_wide_symbol_leaves_nothing_of_it_behind() -> None:
    size = 1 << 20
    timeline = timeline_of(load(BASE, size, "big", (10, 50)), load(BASE, size, "big", (20, 30)))
    assert len(timeline.lifetimes()) == 1
    assert timeline.at(BASE + size - 1, 35)[1] == EXACT
    assert timeline.at(BASE + size - 1, 15)[0] is None


# Images, whose ends are only an upper bound.

PAGE = 4096


SECOND = 1_000_000_000


IMAGE = "bpf_trampoline_6442500001"


@given(histories(images=True))
@settings(max_examples=120)
def test_no_byte_that_is_held_gets_another_name(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    for address, time in questions(held):
        there = next((one for one in held if one.holds(address, time)), None)
        if there is None:
            continue
        lifetime, said = timeline.at(address, time)
        if lifetime is None:
            # An image may be where a program ran a moment ago; a program's end is known.
            assert there.is_image
            assert said is AMBIGUOUS
            continue
        assert (lifetime.symbol.start, lifetime.symbol.name) == (there.start, there.name)
        assert said == EXACT


@given(histories(images=True))
@settings(max_examples=100)
def test_no_answer_from_a_symbol_that_was_not_loaded_or_does_not_reach(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    for address, time in questions(held):
        lifetime, said = timeline.at(address, time)
        if lifetime is None:
            continue
        assert lifetime.symbol.start <= address < lifetime.symbol.end
        assert lifetime.loaded_earliest <= time
        unloaded = lifetime.unloaded_latest
        assert said == (GRACE if unloaded is not None and time > unloaded else EXACT)
        between = [
            one
            for one in held
            if lifetime.symbol.start < one.start <= address
            and one.holds(one.start, time)
            and lifetime.open_ended
        ]
        assert not between, "an image reaches over the start of what is there"


@given(histories(images=True))
@settings(max_examples=100)
def test_live_with_images_equals_brute_force(held: list[Held]) -> None:
    live = timeline_of(*changes_of(held)).live()
    expected = sorted((one.start, one.name) for one in held if one.unloaded is None)
    assert [(one.symbol.start, one.symbol.name) for one in live] == expected


def test_image_never_shadows_a_program_that_starts_inside_its_page() -> None:
    image = load(BASE, PAGE, IMAGE, 10, open_ended=True)
    program = load(BASE + 0x100, 0x80, "bpf_prog_0000000000000001_a", 5)
    for changes in ((image, program), (program, image)):
        timeline = timeline_of(*changes)
        assert told(timeline.at(BASE + 0x40, 20)) == f"{IMAGE} exact"
        assert told(timeline.at(BASE + 0xFF, 20)) == f"{IMAGE} exact"
        assert told(timeline.at(BASE + 0x100, 20)) == "bpf_prog_0000000000000001_a exact"
        assert told(timeline.at(BASE + 0x17F, 20)) == "bpf_prog_0000000000000001_a exact"
        assert timeline.at(BASE + 0x180, 20) == (None, NOT_LOADED)
        assert timeline.at(BASE + PAGE, 20) == (None, AMONG_BPF)


def test_image_loaded_where_a_program_was_takes_it_once_that_cannot_run() -> None:
    program = load(BASE + 0x100, 0x80, "bpf_prog_0000000000000001_a", 5)
    image = load(BASE, PAGE, IMAGE, 20, open_ended=True)
    timeline = timeline_of(program, unload(BASE + 0x100, 10), image)
    assert told(timeline.at(BASE + 0x110, 15)) == "bpf_prog_0000000000000001_a grace"
    assert timeline.at(BASE + 0x110, 30) == (None, AMBIGUOUS)
    assert told(timeline.at(BASE + 0x110, 10 * SECOND)) == f"{IMAGE} exact"
    assert told(timeline.at(BASE + 0x40, 30)) == f"{IMAGE} exact"


def test_image_ends_at_a_newer_image_in_its_page() -> None:
    first = load(BASE, PAGE, IMAGE, 10, open_ended=True)
    second = load(BASE + 0x80, PAGE, "bpf_dispatcher_xdp", 20, open_ended=True)
    timeline = timeline_of(second, first)
    assert told(timeline.at(BASE + 0x7F, 30)) == f"{IMAGE} exact"
    assert told(timeline.at(BASE + 0x80, 30)) == "bpf_dispatcher_xdp exact"
    assert told(timeline.at(BASE + PAGE, 30)) == "bpf_dispatcher_xdp exact"
    timeline.apply(unload(BASE + 0x80, 40, "bpf_dispatcher_xdp"))
    assert [one.symbol.name for one in timeline.live()] == [IMAGE]
    assert told(timeline.at(BASE + 0x40, 50)) == f"{IMAGE} exact"


def test_true_end_of_an_image_from_another_report_counts() -> None:
    guess = load(BASE, PAGE, IMAGE, (0, 50), open_ended=True)
    known = load(BASE, 0x90, IMAGE, (10, 10))
    for changes in ((guess, known), (known, guess)):
        timeline = timeline_of(*changes)
        assert timeline.count == 1
        assert told(timeline.at(BASE + 0x8F, 60)) == f"{IMAGE} exact"
        assert timeline.at(BASE + 0x90, 60)[0] is None
        assert timeline.at(BASE + 0x8F, 5)[0] is None


# Times that are known only to lie in a window, gaps, and what a name is then worth.

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"


def drained(held: list[Held], reads: list[int]) -> list[Load | Unload]:
    """A history as a source reports it that learns of changes at ``reads`` only."""
    changes = changes_of(held)
    for change in changes:
        at = bisect_left(reads, change.earliest)
        if isinstance(change, Unload) or change.prog_id is None or change.earliest % 2:
            change.earliest = reads[at - 1] + 1 if at else 0
        change.latest = reads[at]
    return changes


@given(histories(images=True), st.sets(st.integers(100, 300)))
@settings(max_examples=120)
def test_in_windows_a_held_byte_is_named_right_or_not_at_all(
    held: list[Held], some: set[int]
) -> None:
    last = max((max(one.loaded, one.unloaded or 0) for one in held), default=0)
    timeline = timeline_of(*drained(held, [*sorted(some), last + 301]))
    for address, time in questions(held):
        lifetime, said = timeline.at(address, time)
        there = next((one for one in held if one.holds(address, time)), None)
        if there is None:
            # Nobody: then at most one that was there, or may have come already.
            assert lifetime is None or lifetime.loaded_earliest <= time
        elif lifetime is None:
            assert said is AMBIGUOUS, f"{address:#x} at {time} is {there}"
        else:
            assert (lifetime.symbol.start, lifetime.symbol.name) == (there.start, there.name)


def test_sample_between_an_unload_and_the_next_load_is_never_the_newcomers() -> None:
    timeline = timeline_of(
        load(BASE, 64, A, 10), unload(BASE, (20, 24), A), load(BASE, 64, B, (30, 36))
    )
    said = {time: told(timeline.at(BASE, time)) for time in (20, 24, 25, 29, 30, 35, 36)}
    assert said == {
        20: f"{A} {EXACT}",
        24: f"{A} {EXACT}",
        25: f"{A} {GRACE}",
        29: f"{A} {GRACE}",
        30: AMBIGUOUS,
        35: AMBIGUOUS,
        36: f"{B} {EXACT}",
    }


def test_two_loads_of_one_name_are_one_name() -> None:
    timeline = timeline_of(
        load(BASE, 64, A, 10, 1), unload(BASE, (20, 40), A, 1), load(BASE, 64, A, (20, 40), 2)
    )
    assert timeline.count == 2
    assert {told(timeline.at(BASE + 1, time)) for time in range(10, 60)} == {f"{A} {EXACT}"}


def test_first_symbol_at_an_address_has_its_whole_window() -> None:
    timeline = timeline_of(load(BASE, 64, A, (10, 20)))
    assert timeline.at(BASE, 9) == (None, NOT_LOADED)
    assert told(timeline.at(BASE, 10)) == f"{A} {EXACT}"
    assert timeline.at(BASE + 4096, 10) == (None, AMONG_BPF)
    assert timeline.at(BASE + (2 << 21), 10) == (None, UNKNOWN_ADDRESS)


def test_snapshot_and_event_make_one_lifetime_of_the_narrower_window() -> None:
    """With ids they meet in any order; by name alone, while the symbol is live."""
    for prog_id in (None, 7):
        for swap in (False, True):
            reports = [load(BASE, 64, A, (5, 90), prog_id), load(BASE, 64, A, (40, 45))]
            timeline = timeline_of(*(reversed(reports) if swap else reports))
            (lifetime,) = timeline.lifetimes()
            assert (lifetime.loaded_earliest, lifetime.loaded_latest) == (40, 45)
            assert lifetime.prog_id == prog_id
            assert timeline.live() == [lifetime]


def test_resync_and_late_event_make_one_unload_of_the_narrower_window() -> None:
    for swap in (False, True):
        reports = [unload(BASE, (20, 90), A), unload(BASE, 33, A)]
        timeline = timeline_of(load(BASE, 64, A, 10), *(reversed(reports) if swap else reports))
        (lifetime,) = timeline.lifetimes()
        assert (lifetime.unloaded_earliest, lifetime.unloaded_latest) == (33, 33)


def test_gap_marks_names_and_misses_in_it_and_graces_after_it() -> None:
    timeline = timeline_of(
        load(BASE, 64, A, 10),
        unload(BASE, 20, A),
        load(BASE + 4096, 64, B, 10),
        Loss(30, 40, "test"),
    )
    ended = {time: told(timeline.at(BASE, time)) for time in (15, 25, 30, 40, 50)}
    assert ended == {
        15: f"{A} {EXACT}",
        25: f"{A} {GRACE}",
        30: f"{A} {GAP}",
        40: f"{A} {GAP}",
        50: f"{A} {GAP}",  # what came and went in the gap could have taken its place
    }
    live = {time: told(timeline.at(BASE + 4096, time)) for time in (29, 30, 40, 41)}
    assert live == {29: f"{B} {EXACT}", 30: f"{B} {GAP}", 40: f"{B} {GAP}", 41: f"{B} {EXACT}"}
    assert timeline.at(0x1000, 35) == (None, LOST)
    assert timeline.at(BASE, 5) == (None, NOT_LOADED)
    assert timeline.at(0x1000, 45) == (None, UNKNOWN_ADDRESS)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12),
    st.integers(0, 80),
    st.integers(0, 10),
)
@settings(max_examples=120)
def test_gaps_equal_a_set_of_instants(gaps: list[tuple[int, int]], since: int, length: int) -> None:
    timeline = timeline_of(*(Loss(start, start + span, "test") for start, span in gaps))
    lost = {time for start, span in gaps for time in range(start, start + span + 1)}
    expected = not lost.isdisjoint(range(since, since + length + 1))
    assert timeline.lost_between(since, since + length) == expected


def test_one_that_left_long_ago_does_not_speak_for_its_namesake() -> None:
    """Two tied ones are long gone; a third of the same name and start may have come since."""
    window, late = (0, 122), (123, 6_000_000_425)
    timeline = timeline_of(
        load(BASE, 0x300, A, window),
        unload(BASE, window, A),
        load(BASE + 0x7C, 4, A, window),
        unload(BASE + 0x7C, window, A),
        load(BASE + 0x7C, 200, A, late),
    )
    assert told(timeline.at(BASE + 0x7C, 3_000_000_123)) == f"{A} {EXACT}"


# Modules: a stretch of code with functions in it, and no grace.

FUNCTIONS = PackedFunctions(pack_functions([(0, 0x40, "first"), (0x80, 0x1000, "second")]))


def module(start: int, size: int, name: str, time: int | tuple[int, int]) -> Load:
    earliest, latest = time if isinstance(time, tuple) else (time, time)
    symbol = Symbol(start, start + size, name, MODULE, name)
    return Load(symbol, earliest, latest, functions=FUNCTIONS)


class Section(NamedTuple):
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
def pasts(draw: st.DrawFn) -> list[Section]:
    """What a kernel held, one after another: never two on one byte."""
    held: list[Section] = []
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
            held.append(Section(start, end, name, now, None, is_module))
    return held


def changes_of_sections(held: list[Section]) -> list[Load | Unload]:
    changes: list[tuple[int, Load | Unload]] = []
    for one in held:
        size = one.end - one.start
        make = module if one.is_module else load
        changes.append((one.loaded, make(one.start, size, one.name, one.loaded)))
        if one.unloaded is not None:
            changes.append((one.unloaded, unload(one.start, one.unloaded, one.name)))
    return [change for _, change in sorted(changes, key=lambda pair: pair[0])]


def expected(held: list[Section], address: int, time: int) -> str | None:
    """Who surely had an address at a time, or None: nobody, or one that ran on."""
    there = [one for one in held if one.start <= address < one.end and one.loaded <= time]
    if not there:
        return None
    last = max(there, key=lambda one: one.loaded)
    if last.unloaded is None or time < last.unloaded:
        return last.name
    return None


@given(pasts(), st.randoms())
@settings(max_examples=150)
def test_who_was_there_is_who_the_kernel_had_there(held: list[Section], random: object) -> None:
    changes = changes_of_sections(held)
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


# What a look-up and a change cost, counted in executed lines of the package.

PACKAGE = os.path.dirname(ksym_plugin.__file__)


def lines_run(action: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def churned(rounds: int, images: bool = True) -> Timeline:
    """One page on which programs and images follow one another, at the same few starts."""
    timeline = Timeline()
    for number in range(rounds):
        for place in range(8):
            start = BASE + 0x100 * place
            now = 1000 * number + 10 * place
            image = place == 7 and images
            name = f"bpf_trampoline_{number}" if image else f"bpf_prog_{number:016x}"
            size = 4096 if image else 0xC0 + 8 * (number % 8)
            timeline.apply(load(start, size, name, now, None if image else number, image))
            timeline.apply(unload(start, now + 500, name))
        timeline.apply(Loss(1000 * number + 900, 1000 * number + 901, "test"))
    return timeline


FEW, MANY = 20, 2000


@pytest.mark.parametrize("offset", [0x0, 0x44, 0xBF, 0x740, 0x900])
@pytest.mark.parametrize("back", [1, 5, 15])
def test_look_up_costs_binary_searches_whatever_the_history(offset: int, back: int) -> None:
    """A hundred times the history is seven steps more for each start that is searched."""
    few, many = (look_up_lines(rounds, back, offset) for rounds in (FEW, MANY))
    assert 0 < many < 2 * few


def lines_of_changes(rounds: int) -> tuple[int, int]:
    """Lines run by two loads, and by their unloads, after so many rounds."""
    timeline = churned(rounds)
    now = 1000 * rounds
    loads = [
        load(BASE, 0x100, "bpf_prog_00000000000000ff", now, rounds + 1),
        load(BASE + 0x700, 4096, "bpf_trampoline_x", now, None, True),
    ]
    unloads = [unload(change.symbol.start, now + 5) for change in loads]
    return (
        lines_run(lambda: [timeline.apply(change) for change in loads]),
        lines_run(lambda: [timeline.apply(change) for change in unloads]),
    )


def test_change_runs_the_same_lines_whatever_the_history() -> None:
    assert lines_of_changes(FEW) == lines_of_changes(MANY)


@pytest.mark.parametrize("offset", [0x0, 0x44, 0xBF])
def test_look_up_runs_the_same_lines_where_ends_are_known(offset: int) -> None:
    few, many = (look_up_lines(rounds, 5, offset, images=False) for rounds in (FEW, MANY))
    assert few == many > 0


def look_up_lines(rounds: int, back: int, offset: int, images: bool = True) -> int:
    timeline = churned(rounds, images)
    assert timeline.count == 8 * rounds
    return lines_run(lambda: timeline.at(BASE + offset, 1000 * (rounds - back) + 300))


def test_unloads_without_loads_are_kept_within_bounds() -> None:
    timeline = Timeline()
    for number in range(10_000):
        timeline.apply(unload(BASE + 64 * number, number))
        timeline.apply(unload(BASE, number))
    kept = timeline._pairing._orphans
    assert len(kept) <= 4096
    assert max(map(len, kept.values())) <= 64


def test_expire_drops_what_ended_and_keeps_what_answers() -> None:
    timeline = churned(FEW)
    keep = load(BASE + 0x5000, 64, "bpf_prog_00000000000000fe", 5, 99)
    timeline.apply(keep)
    ground = timeline.extent
    timeline.expire(1000 * (FEW - 2))
    assert timeline.count < 8 * 3 + 1
    assert timeline.at(BASE + 0x5000, 10)[0] is not None
    assert timeline.at(BASE, 1000 * (FEW - 1) + 10)[0] is not None
    assert timeline.extent > ground, "what was decided on the old ground must be asked again"


@pytest.mark.parametrize("start", [BASE, BASE - 0x40])
@pytest.mark.parametrize("unloaded", [30, 150])
def test_expire_does_not_bring_back_what_another_was_loaded_over(start: int, unloaded: int) -> None:
    """The unload of the first was lost, and what shows that it has gone is dropped."""
    timeline = timeline_of(
        load(BASE, 0x80, "lost", 10), load(start, 0x100, "next", 20), unload(start, unloaded)
    )
    late = 10 * SECOND
    for _ in range(2):
        assert timeline.at(BASE, late)[0] is None
        assert start != BASE or timeline.open() == []
        timeline.expire(100)
    assert timeline.open() == []
    # What was replaced later than that is kept with what replaced it.
    timeline = timeline_of(load(BASE, 0x80, "lost", 10), load(BASE, 0x80, "next", 200))
    timeline.expire(100)
    assert [one.symbol.name for one in timeline.lifetimes()] == ["lost", "next"]
    assert told(timeline.at(BASE, 199)) == "lost exact"


@given(histories(), st.sets(st.integers(0, 13)), st.integers(0, 13), st.integers(0, 2))
@settings(max_examples=400)
def test_expire_changes_no_answer_of_later(
    held: list[Held], lost: set[int], at: int, by: int
) -> None:
    """Unloads are lost: what followed shows that a symbol has gone, and may be dropped, too."""
    changes: list[tuple[int, int, Load | Unload]] = [(one.loaded, 1, one.load()) for one in held]
    changes += [
        (one.unloaded, 0, one.unload())
        for number, one in enumerate(held)
        if one.unloaded is not None and number not in lost
    ]
    ordered = [change for *_, change in sorted(changes, key=lambda change: change[:2])]
    whole, expired = timeline_of(*ordered), timeline_of(*ordered)
    times = sorted({moment for moment, *_ in changes}) or [0]
    before = times[at % len(times)] + by
    expired.expire(before)
    places = {one.start + offset for one in held for offset in (0, 3, 70, 190)}
    for time in [before, *(time for time in times if time > before), 1 << 40]:
        for place in places:
            then, now = whole.at(place, time), expired.at(place, time)
            same = told(now) == told(then)
            holder = [one.name for one in held if one.holds(place, time)]
            if now[0] is not None:
                assert same or now[0].symbol.name in holder
            elif then[0] is not None:
                assert then[0].symbol.name not in holder


def test_what_was_given_away_has_no_name_among_equals_either() -> None:
    """Two loads of an image that nothing orders, and a program in the middle of its place."""
    second = 1_000_000_000
    window = (second, 2 * second)
    changes = [load(BASE, 0x80, "bpf_trampoline_1", window), unload(BASE, window)] * 2
    timeline = timeline_of(*changes, load(BASE + 0x40, 0x20, "bpf_prog_q", 26 * second // 10))
    assert timeline.at(BASE + 4, 27 * second // 10)[0] is None
