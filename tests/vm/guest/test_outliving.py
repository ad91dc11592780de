"""Samples of programs that are unloaded while they run: theirs, until another has the place."""

from __future__ import annotations

import re

import pytest

from tests.oracle import truth
from tests.vm.guest.around import Recorded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

GRACE_SPAN = 2_000_000_000


@pytest.fixture(scope="module")
def recorded(workloads: Path) -> Recorded:
    return Recorded(workloads, "outliving")


def within(sample: truth.Sample, since: int, until: int) -> bool:
    """Whether a sample is surely of that time: what is printed is cut off to the microsecond."""
    return since + 1000 <= sample.time < until - 1000


def end_of_grace(told: dict[str, Any]) -> int:
    """Where everything takes long a program may run for longer than it is taken to."""
    end: int = min(told["ended"], told["unloading"][0] + GRACE_SPAN)
    return end


def frames(recorded: Recorded, symbols: list[list[object]], since: int, until: int) -> list[tuple]:
    """Names of frames in the symbols in a time, and those they should have."""
    return [
        (frame.name, name)
        for sample in recorded.samples
        if within(sample, since, until)
        for depth, frame in enumerate(sample.frames)
        for start, end, name in symbols
        if start <= frame.ip - (depth > 0) < end
    ]


def test_after_its_unload_a_program_that_runs_keeps_its_name(recorded: Recorded) -> None:
    assert len(recorded.truth) == 3
    for told in recorded.truth:
        began, unloaded = told["unloading"]
        before = frames(recorded, told["symbols"], told["loaded"], began)
        after = frames(recorded, told["symbols"], unloaded, end_of_grace(told))
        print(f"{len(after)} of {len(before) + len(after)} frames came after the unload")
        assert len(after) > 30
        assert [pair for pair in before + after if pair[0] != pair[1]] == []


def test_that_is_counted_as_grace(recorded: Recorded) -> None:
    found = re.search(r"([\d,]+) ran after their unload \(grace\)", recorded.said)
    assert found, recorded.said
    counted = int(found[1].replace(",", ""))
    least = most = 0
    for told in recorded.truth:
        symbols, (began, unloaded) = told["symbols"], told["unloading"]
        least += len(frames(recorded, symbols, unloaded, end_of_grace(told)))
        most += len(frames(recorded, symbols, began - 2000, told["ended"] + 2000))
    assert least <= counted <= most
    unloaded = recorded.truth[0]["unloading"][1]
    symbols = recorded.truth[0]["symbols"]
    answers = recorded.resolve(unloaded + 1_000_000, *(start + 8 for start, _, _ in symbols))
    told = [(answer["name"], answer["certainty"]) for answer in answers]
    assert told == [(name, "grace") for _, _, name in symbols]


def test_the_place_is_the_newcomer_s_once_it_is_taken(recorded: Recorded) -> None:
    for told in recorded.truth:
        newcomer = told["newcomer"]
        since = newcomer["running"][0]
        seen = frames(recorded, [newcomer["symbol"]], *newcomer["running"])
        assert len(seen) > 10
        assert [pair for pair in seen if pair[0] != pair[1]] == []
        (low, high, name), (start, end, old) = newcomer["symbol"], told["symbols"][1]
        shared, *edges = recorded.resolve(since, max(low, start), start, end - 1)
        assert (shared["name"], shared["certainty"]) == (name, "exact")
        for address, answer in zip((start, end - 1), edges):
            expected = {name} if low <= address < high else {None, old}
            assert answer["name"] in expected
