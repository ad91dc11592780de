"""Which unload belongs to which load, report by report."""

from __future__ import annotations

import itertools

import pytest

from ksym_plugin.timeline.symbols import UNNAMED_BPF, Load, Unload
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, timeline_of, told, unload

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"


def lives(timeline: Timeline) -> list[tuple[str, int, int | None]]:
    return [
        (one.symbol.name, one.loaded_latest, one.unloaded_latest) for one in timeline.lifetimes()
    ]


def test_delete_semantics() -> None:
    first, second, strange = (0xFFFFFFFFC0F30400, 0xFFFFFFFFC0F30600, 0xFFFFFFFFC0AAAAAA)
    timeline = timeline_of(
        load(first, 0x200, "A", 10),
        load(second, 0x200, "B", 10),
        unload(second, 20),
        unload(strange, 30),
        load(second, 0x100, "C", 40),
    )
    assert told(timeline.at(second + 2, 15)) == "B exact"
    assert told(timeline.at(second + 2, 25)) == "B grace"  # never A, which is below
    assert told(timeline.at(second + 2, 45)) == "C exact"
    assert timeline.at(second + 0x110, 45)[0] is None
    assert told(timeline.at(first + 0x1FF, 45)) == "A exact"


def test_stale_bpf_table() -> None:
    start = 0xFFFFFFFFC0100000
    old, new = "bpf_prog_aaaaaaaaaaaaaaaa_old", "bpf_prog_bbbbbbbbbbbbbbbb_new"
    timeline = timeline_of(
        load(start, 0x200, old, 10), unload(start, 20, old), load(start, 0x180, new, 30)
    )
    assert timeline.at(start + 0x40, 5)[0] is None
    assert told(timeline.at(start + 0x40, 15)) == f"{old} exact"
    # It may still be running: its RCU grace period has no end that can be seen.
    assert told(timeline.at(start + 0x40, 25)) == f"{old} grace"
    assert told(timeline.at(start + 0x40, 35)) == f"{new} exact"
    assert timeline.at(start + 0x190, 35)[0] is None


def test_program_announced_without_its_name() -> None:
    main, sub = 0xFFFFFFFFC001107C, 0xFFFFFFFFC00110C8
    demo = "bpf_prog_a4a0000000000000_lookup_demo"
    timeline = timeline_of(load(main, 0x60, UNNAMED_BPF, 10), load(sub, 0x90, demo, 10))
    assert told(timeline.at(0xFFFFFFFFC00110A1, 20)) == f"{UNNAMED_BPF} exact"
    assert told(timeline.at(sub - 1, 20)) == f"{UNNAMED_BPF} exact"
    assert told(timeline.at(sub, 20)) == f"{demo} exact"  # the overlap is the later start's
    named = "bpf_prog_b5b0000000000000_main"
    timeline.apply(load(main, 0x60, named, (0, 30)))
    assert timeline.count == 2
    assert told(timeline.at(0xFFFFFFFFC00110A1, 20)) == f"{named} exact"
    timeline.apply(unload(main, 40, UNNAMED_BPF))
    assert told(timeline.at(main, 50)) == f"{named} grace"


def test_of_two_at_one_start_the_later_one_has_it() -> None:
    start = 0xFFFFFFFFA0257CF8
    sub, main = "bpf_prog_b07c000000000000_F", "bpf_prog_ae31000000000000__dummy_tracepoi"
    timeline = timeline_of(load(start, 0x100, sub, 10), load(start, 0x100, main, 11))
    assert told(timeline.at(0xFFFFFFFFA0257D00, 20)) == f"{main} exact"
    assert [one.symbol.name for one in timeline.live()] == [main]
    assert [name for name, _, _ in lives(timeline)] == [sub, main]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_unloads_that_name_nothing_are_paired_by_time(order: tuple[int, ...]) -> None:
    reports = [load(BASE, 64, A, 10), unload(BASE, 20), load(BASE, 64, B, 30), unload(BASE, 40)]
    timeline = timeline_of(*(reports[at] for at in order))
    assert lives(timeline) == [(A, 10, 20), (B, 30, 40)]
    assert timeline.live() == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_narrowed_unload_survives_being_paired_anew(order: tuple[int, ...]) -> None:
    reports: list[Load | Unload] = [
        load(BASE, 64, A, 10, 1),
        unload(BASE, 20, A, 1),
        unload(BASE, (10, 60), A, 1),
        load(BASE, 64, A, 30, 2),
        load(BASE, 64, A, (5, 60), 2),
    ]
    timeline = timeline_of(*(reports[at] for at in order))
    assert lives(timeline) == [(A, 10, 20), (A, 30, None)]
    assert timeline.lifetimes()[0].unloaded_earliest == 20


def test_unload_of_another_name_or_id_ends_nothing() -> None:
    timeline = timeline_of(load(BASE, 64, A, 10, 1))
    assert timeline.apply(unload(BASE, 20, B)) is None
    assert timeline.apply(unload(BASE, 20, A, 2)) is None
    assert timeline.apply(unload(BASE + 1, 20, A, 1)) is None
    assert [one.symbol.name for one in timeline.live()] == [A]
    assert timeline.apply(unload(BASE, 20, B, 1)) is not None  # the id decides, where known
    assert timeline.live() == []


def test_lost_unload_is_ended_by_the_load_over_it() -> None:
    timeline = timeline_of(load(BASE, 0x100, A, 10), load(BASE - 0x20, 0x100, B, 20))
    assert [one.symbol.name for one in timeline.live()] == [B]
    assert told(timeline.at(BASE, 19)) == f"{A} exact"
    assert told(timeline.at(BASE, 20)) == f"{B} exact"


def test_what_late_reports_changed_is_told_once() -> None:
    timeline = timeline_of(load(BASE, 64, A, 10), unload(BASE, 40))
    assert timeline.take_disturbed() == []
    late = timeline.apply(load(BASE, 64, B, 30))
    disturbed = timeline.take_disturbed()
    assert {one.symbol.name for one in disturbed} == {A, B}
    assert late in disturbed
    assert timeline.take_disturbed() == []
    assert lives(timeline) == [(A, 10, None), (B, 30, 40)]


def test_better_report_of_a_load_completes_the_first() -> None:
    timeline = timeline_of(load(BASE, 64, A, (0, 50)))
    again = load(BASE, 64, A, 40, 9)
    again.pid, again.comm = 77, "loader"
    timeline.apply(again)
    (one,) = timeline.lifetimes()
    assert (one.prog_id, one.pid, one.comm) == (9, 77, "loader")


def test_load_at_the_top_of_the_address_space() -> None:
    top = (1 << 64) - 64
    timeline = timeline_of(load(top, 64, A, 10))
    assert told(timeline.at((1 << 64) - 1, 10)) == f"{A} exact"
    assert timeline.at(1 << 64, 10)[0] is None
