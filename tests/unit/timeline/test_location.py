"""Lines for frames: of a leaf the instruction's, of a caller the call's."""

from __future__ import annotations

import pytest

from ksym_plugin.timeline.location import Locator
from ksym_plugin.timeline.packed import Line, pack_lines, unpack_lines
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import Frame, Lifetime, trampoline_key
from tests.unit.helpers import BASE, load, timeline_of

NAME = "bpf_prog_00000000000000aa_main"
TABLE = unpack_lines(pack_lines([[(0, 10, "a.c", "call();"), (8, 11, "a.c", "return h;")]]))


class Lines:
    """One program's, whatever the lifetime."""

    def line(self, lifetime: Lifetime, offset: int, /) -> Line | None:
        return TABLE.find(0, offset) if lifetime.symbol.start == BASE else None

    def traced(self, lifetime: Lifetime, /) -> str | None:
        return f"target of {trampoline_key(lifetime.symbol.name)}"


def lines_of(addresses: list[int], first_is_leaf: bool = True) -> list[int | None]:
    past = timeline_of(
        load(BASE, 64, NAME, 100, 7), load(BASE + 64, 64, "bpf_trampoline_1", 100, None, True)
    )
    frames = Resolver(past).frames(addresses, 200)
    Locator(Lines()).locate(frames, first_is_leaf)
    return [frame.line if isinstance(frame, Frame) else None for frame in frames]


def test_the_leaf_is_taken_as_it_is_and_callers_from_the_byte_before() -> None:
    assert lines_of([BASE + 8, BASE + 8, BASE + 9]) == [11, 10, 11]
    assert lines_of([BASE + 8], first_is_leaf=False) == [10]


def test_the_first_byte_stays_in_its_function() -> None:
    assert lines_of([BASE, BASE]) == [10, 10]


def test_what_is_no_program_or_has_no_name_has_no_line() -> None:
    assert lines_of([BASE + 64, BASE + 0x100_0000]) == [None, None]


def test_a_trampoline_says_what_it_traces() -> None:
    past = timeline_of(load(BASE, 64, "bpf_trampoline_6442467359", 100, None, True))
    frames = Resolver(past).frames([BASE + 8], 200)
    Locator(Lines()).locate(frames)
    assert isinstance(frames[0], Frame)
    assert frames[0].traced == "target of 6442467359"


@pytest.mark.parametrize(
    "name", ["bpf_trampoline_", "bpf_trampoline_1x", f"bpf_trampoline_{1 << 64}", "bpf_prog_aa"]
)
def test_a_name_without_a_key_has_none(name: str) -> None:
    assert trampoline_key(name) is None
