"""The work of a look-up and of a change does not grow with the history.

Counted in executed lines of the package, not in time.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, Callable

import pytest

import ksym_plugin
from ksym_plugin.timeline.symbols import Loss
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, unload

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
