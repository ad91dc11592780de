"""Symbols that are wide, as modules are, among those that are not."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline import index
from ksym_plugin.timeline.symbols import EXACT, NOT_LOADED, UNKNOWN_ADDRESS
from tests.unit.helpers import (
    BASE,
    Held,
    changes_of,
    histories,
    load,
    questions,
    timeline_of,
    unload,
)
from tests.unit.timeline.test_timeline import check_exact


@given(histories(), st.sampled_from([1, 60, 100, 300]))
@settings(deadline=None)
def test_who_was_there_does_not_depend_on_what_counts_as_wide(held: list[Held], wide: int) -> None:
    with mock.patch.object(index, "WIDE", wide):
        timeline = timeline_of(*changes_of(held))
        for address, time in questions(held):
            check_exact(timeline, held, address, time)


@given(histories(images=True), st.sampled_from([1, 60, 100, 300]))
@settings(deadline=None)
def test_nor_do_answers_beside_open_ends(held: list[Held], wide: int) -> None:
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
