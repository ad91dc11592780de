"""Images, of which only an upper bound of the end is known, beside programs."""

from __future__ import annotations

from hypothesis import given, settings

from ksym_plugin.timeline.symbols import AMBIGUOUS, AMONG_BPF, EXACT, GRACE, NOT_LOADED
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

PAGE = 4096
SECOND = 1_000_000_000
IMAGE = "bpf_trampoline_6442500001"


@given(histories(images=True))
@settings(max_examples=120, deadline=None)
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
@settings(max_examples=100, deadline=None)
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
@settings(max_examples=100, deadline=None)
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
