"""Times that are known only to lie in a window, gaps, and what a name is then worth."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    EXACT,
    GAP,
    GRACE,
    LOST,
    NOT_LOADED,
    UNKNOWN_ADDRESS,
    Load,
    Loss,
    Unload,
)
from tests.unit.helpers import (
    BASE,
    Held,
    changes_of,
    histories,
    load,
    questions,
    timeline_of,
    told,
    unload,
)

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
@settings(max_examples=120, deadline=None)
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
@settings(max_examples=120, deadline=None)
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
