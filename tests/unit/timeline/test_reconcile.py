"""What turns a table into the kernel's, and names put right by what bpf(2) says."""

from __future__ import annotations

from ksym_plugin.timeline.program import ProgramDetails
from ksym_plugin.timeline.reconcile import differences, heal
from ksym_plugin.timeline.symbols import UNNAMED_BPF, Lifetime, Load
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, timeline_of, unload

# A snapshot against what is held live: worked out by hand.

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"


SINCE, BEGAN, ENDED = 100, 200, 210


def changes(live: list[Load], snapshot: list[Load]) -> list[tuple]:
    held = {one.symbol.start: Lifetime(one) for one in live}
    found = differences(held, snapshot, False, (SINCE, BEGAN, ENDED))
    return [
        (type(change).__name__, change.earliest, change.latest)  # type: ignore[union-attr]
        for change in found
    ]


def test_what_is_there_and_known_is_told_again_as_it_was() -> None:
    assert changes([load(BASE, 64, A, 50, 1)], [load(BASE, 64, A, (40, 205), 1)]) == [
        ("Load", 40, 205)
    ]


def test_what_is_gone_went_since_and_what_is_new_came_since() -> None:
    told = changes([load(BASE, 64, A, 50, 1)], [load(BASE, 64, B, (90, 205), 2)])
    assert told == [("Unload", SINCE, ENDED), ("Load", SINCE, 205)]


def test_a_window_never_ends_before_it_begins() -> None:
    """A snapshot that knows a program of before tells when it was first seen."""
    assert changes([], [load(BASE, 64, A, (40, 60), 1)]) == [("Load", 60, 60)]


# Names and ids put right by what bpf(2) says, and never those of another program.

MAIN = "bpf_prog_00000000000000aa_main_function_long"


PART = "bpf_prog_00000000000000bb_part"


OTHER = "bpf_prog_00000000000000cc_other"


NEXT = BASE + 0x400


def program(load_time: int = 90) -> ProgramDetails:
    known = ProgramDetails(7, "")
    known.tag, known.load_time = "00000000000000aa", load_time
    known.functions = [(BASE, 64, MAIN), (NEXT, 32, PART)]
    return known


def names(timeline: Timeline) -> list[tuple[str, int | None]]:
    return [(life.symbol.name, life.prog_id) for life in timeline.lifetimes()]


def test_a_nameless_main_program_gets_its_name() -> None:
    timeline = timeline_of(load(BASE, 64, UNNAMED_BPF, 100, 7), load(NEXT, 32, PART, 100, 7))
    assert [life.symbol.start for life in heal(timeline, program())] == [BASE]
    assert names(timeline) == [(MAIN, 7), (PART, 7)]


def test_a_subprogram_with_the_main_ones_name_gets_its_own() -> None:
    timeline = timeline_of(load(BASE, 64, MAIN, 100), load(NEXT, 32, MAIN, 100))
    assert len(heal(timeline, program())) == 2
    assert names(timeline) == [(MAIN, 7), (PART, 7)]


def test_a_name_that_was_cut_is_made_whole_and_its_unload_still_fits() -> None:
    timeline = timeline_of(load(BASE, 64, MAIN[:41], 100, 7), load(NEXT, 32, PART, 100, 7))
    heal(timeline, program())
    assert names(timeline)[0] == (MAIN, 7)
    assert timeline.apply(unload(BASE, 120, MAIN[:41], 7)) is not None


def test_what_was_right_already_is_left_alone() -> None:
    timeline = timeline_of(load(BASE, 64, MAIN, 100, 7), load(NEXT, 32, PART, 100, 7))
    assert heal(timeline, program()) == []


def test_other_programs_at_the_place_keep_their_names() -> None:
    timeline = timeline_of(
        load(BASE, 64, UNNAMED_BPF, 40, 5),
        unload(BASE, 50, None, 5),
        load(BASE, 64, OTHER, 100, 8),
        load(NEXT, 32, OTHER, 95),
    )
    assert heal(timeline, program()) == []


def test_of_two_since_then_the_first_is_meant() -> None:
    timeline = timeline_of(
        load(NEXT, 32, PART, 100),
        unload(NEXT, 110, PART),
        load(NEXT, 32, PART, 120),
    )
    heal(timeline, program())
    assert names(timeline) == [(PART, 7), (PART, None)]


def test_a_name_that_cannot_be_told_changes_nothing() -> None:
    known = program()
    known.functions = [(BASE, 64, "")]
    timeline = timeline_of(load(BASE, 64, UNNAMED_BPF, 100, 7))
    assert heal(timeline, known) == []
    assert names(timeline) == [(UNNAMED_BPF, 7)]
