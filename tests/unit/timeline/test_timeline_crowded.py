"""Cells in which very many symbols started, one after another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline.symbols import AMBIGUOUS, EXACT, GRACE, Load, Unload
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, Held, changes_of, load, questions, timeline_of, unload

_STEP = st.tuples(
    st.integers(0, 24),  # where it starts, in steps of four bytes
    st.sampled_from([4, 12, 40, 64, 100, 300, 700]),
    st.integers(0, 2),  # name
    st.sampled_from([0, 0, 3, 90]),  # how wide the windows of its reports are
)


@st.composite
def crowds(draw: st.DrawFn, exact: bool) -> list[Held]:
    """One symbol at a time, all of them starting within two cells."""
    held: list[Held] = []
    now = 1_000
    for at, size, name, width in draw(st.lists(_STEP, min_size=8, max_size=40)):
        start = BASE + 4 * at
        end = start + size
        gap = 1 if exact else 1 + width
        title = f"bpf_prog_{name:016x}_p"
        held.append(Held(start, end, title, now, now + gap, None, end))
        now += 2 * gap
    return held


def check(timeline: Timeline, held: list[Held]) -> None:
    for address, time in questions(held):
        there = [one for one in held if one.holds(address, time)]
        lifetime, said = timeline.at(address, time)
        if there and said is not AMBIGUOUS:
            assert lifetime is not None
            assert (lifetime.symbol.name, said) == (there[0].name, EXACT)
        elif lifetime is not None:
            # On the very instant of its unload it is still there.
            assert said == GRACE or (lifetime.unloaded_latest or 0) >= time
            assert lifetime.loaded_earliest <= time


@given(crowds(exact=True))
@settings(deadline=None)
def test_who_was_there_is_found_among_many(held: list[Held]) -> None:
    timeline = timeline_of(*changes_of(held))
    check(timeline, held)
    assert all(timeline.at(one.start, one.loaded)[1] is not AMBIGUOUS for one in held)


@given(crowds(exact=False), st.data())
@settings(deadline=None)
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
    check(timeline_of(*changes), held)


def test_a_symbol_at_the_head_of_a_cell_is_found_behind_many() -> None:
    changes: list[Load | Unload] = [load(BASE, 4, "old", 10)]
    for turn in range(100):
        at = BASE + 8 + 4 * (turn % 12)
        changes += [load(at, 100, f"new{turn}", 100 + 2 * turn), unload(at, 101 + 2 * turn)]
    timeline = timeline_of(*changes)
    lifetime, said = timeline.at(BASE + 2, 5_000)
    assert lifetime is not None
    assert (lifetime.symbol.name, said) == ("old", EXACT)
