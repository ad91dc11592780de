"""Source locations of frames: of a leaf the instruction's, of a caller the call's."""

from __future__ import annotations

import copy
import pickle

import pytest

from ksym_plugin.timeline.program import pack_lines, unpack_lines
from ksym_plugin.timeline.resolver import Locator, Resolver
from ksym_plugin.timeline.symbols import (
    KERNEL,
    Frame,
    Lifetime,
    SourceLocation,
    Symbol,
    trampoline_key,
)
from tests.unit.helpers import BASE, load, timeline_of

NAME = "bpf_prog_00000000000000aa_main"
TABLE = unpack_lines(pack_lines([[(0, 10, "a.c", "call();"), (8, 11, "a.c", "return h;")]]))
CORE = 0xFFFF_FFFF_8100_0000


class Lines:
    """One program's, whatever the lifetime."""

    def line(self, lifetime: Lifetime, offset: int, /) -> SourceLocation | None:
        return TABLE.find(0, offset) if lifetime.symbol.start == BASE else None

    def traced(self, lifetime: Lifetime, /) -> str | None:
        return f"target of {trampoline_key(lifetime.symbol.name)}"

    def program_name(self, lifetime: Lifetime, /) -> str | None:
        return f"program of {lifetime.symbol.name}"


class Image:
    """A kernel with one function, whose lines are counted by 16 bytes; its own table too."""

    def line(self, address: int, /) -> SourceLocation | None:
        return SourceLocation("core.c", 1000 + (address - CORE) // 16)

    def find(self, _address: int, /) -> Symbol:
        return Symbol(CORE, CORE + 4096, "core", KERNEL, None)

    def is_kernel(self, address: int, /) -> bool:
        return address >= CORE


def located(addresses: list[int], first_is_leaf: bool = True) -> list[Frame | None]:
    past = timeline_of(
        load(BASE, 64, NAME, 100, 7), load(BASE + 64, 64, "bpf_trampoline_1", 100, None, True)
    )
    locator = Locator(Lines())
    return [
        locator.locate(frame, first_is_leaf and not depth) if isinstance(frame, Frame) else None
        for depth, frame in enumerate(Resolver(past).frames(addresses, 200))
    ]


def lines_of(addresses: list[int], first_is_leaf: bool = True) -> list[int | None]:
    return [
        frame.location.line if frame is not None and frame.location is not None else None
        for frame in located(addresses, first_is_leaf)
    ]


def test_the_leaf_is_taken_as_it_is_and_callers_from_the_byte_before() -> None:
    assert lines_of([BASE + 8, BASE + 8, BASE + 9]) == [11, 10, 11]
    assert lines_of([BASE + 8], first_is_leaf=False) == [10]


def test_the_first_byte_stays_in_its_function() -> None:
    assert lines_of([BASE, BASE]) == [10, 10]


def test_what_is_no_program_or_has_no_name_has_no_line() -> None:
    assert lines_of([BASE + 64, BASE + 0x100_0000]) == [None, None]


def test_a_trampoline_says_what_it_traces() -> None:
    (frame,) = located([BASE + 64 + 8])
    assert frame is not None
    assert frame.traced == "target of 1"


def test_a_frame_that_was_given_out_keeps_its_location() -> None:
    """An address of the kernel image is decided once; its line depends on who asks."""
    resolver, locator = Resolver(None, Image()), Locator(Lines(), Image())

    def ask(is_leaf: bool) -> Frame:
        frame = resolver.resolve(CORE + 40 * 16, 200)
        assert isinstance(frame, Frame)
        return locator.locate(frame, is_leaf)

    leaf, caller, again = ask(True), ask(False), ask(True)
    found = [frame.location and frame.location.line for frame in (leaf, caller, again)]
    assert found == [1040, 1039, 1040]


@pytest.mark.parametrize("attribute", ["name", "location", "traced", "certainty", "new"])
def test_nobody_can_change_a_frame(attribute: str) -> None:
    (frame,) = located([BASE + 8])
    assert frame is not None
    for one in (frame, frame.location):
        with pytest.raises(AttributeError):
            setattr(one, attribute, "other")
        with pytest.raises(AttributeError):
            object.__setattr__(one, attribute, "other")


def test_copies_of_a_frame_are_equal() -> None:
    (frame,) = located([BASE + 8])
    assert frame is not None
    assert copy.copy(frame) == frame
    assert pickle.loads(pickle.dumps(frame.location)) == frame.location


@pytest.mark.parametrize(
    "name", ["bpf_trampoline_", "bpf_trampoline_1x", f"bpf_trampoline_{1 << 64}", "bpf_prog_aa"]
)
def test_a_name_without_a_key_has_none(name: str) -> None:
    assert trampoline_key(name) is None
