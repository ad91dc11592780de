"""Function tables: what was packed comes out, and hostile bytes do no harm."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.timeline.packed import PackedFunctions, pack_functions

NAMES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1)


@st.composite
def functions(draw: st.DrawFn) -> list[tuple[int, int, list[str]]]:
    """Functions that do not overlap, each with its names."""
    at, found = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)))):
        start = at + gap
        names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
        found.append((start, length, names))
        at = start + length
    return found


def rows(found: list[tuple[int, int, list[str]]]) -> list[tuple[int, int, str]]:
    return [(start, length, name) for start, length, names in found for name in names]


@given(functions())
def test_each_offset_has_the_function_that_holds_it(found: list) -> None:
    table = PackedFunctions(pack_functions(rows(found)))
    held = {at: one for one in found for at in range(one[0], one[0] + one[1])}
    for offset in range(max(held, default=0) + 3):
        if offset in held:
            start, length, names = held[offset]
            assert table.find(offset) == (start, start + length, names[0])
            assert table.names(offset) == names
        else:
            assert table.find(offset) is None
            assert table.names(offset) == []
    assert len(table) == len(rows(found))


def test_a_function_goes_on_behind_one_that_lies_within() -> None:
    table = PackedFunctions(pack_functions([(0, 100, "outer"), (20, 10, "inner")]))
    told = [table.find(offset) for offset in (0, 19, 20, 29, 30, 99, 100)]
    outer, inner = (0, 100, "outer"), (20, 30, "inner")
    assert told == [outer, outer, inner, inner, outer, outer, None]


@given(functions(), functions())
def test_equal_functions_have_one_digest(one: list, other: list) -> None:
    first, second = (PackedFunctions(pack_functions(rows(each))) for each in (one, other))
    assert (first.digest == second.digest) == (one == other)
    assert PackedFunctions(pack_functions(rows(one))).digest == first.digest


def test_likeness_is_of_names_and_places() -> None:
    by_file = PackedFunctions(pack_functions([(0, 60, "a"), (64, 8, "b")]))
    assert by_file.is_like(PackedFunctions(pack_functions([(0, 64, "a"), (64, 4096, "b")])))
    assert not by_file.is_like(PackedFunctions(pack_functions([(0, 60, "a"), (64, 8, "c")])))
    assert not by_file.is_like(PackedFunctions(pack_functions([(0, 60, "a"), (72, 8, "b")])))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(b"\1"),
        zlib.compress(b"\xff\xff\xff\xff" + bytes(64)),
        zlib.compress(b"\2\0\0\0" + bytes(16) + b"one name"),
        zlib.compress(b"\1\0\0\0" + bytes(8) + b"two\0names"),
        pack_functions([(0, 8, "a\0b")]),
        pack_functions([(0, 8, "cut off")])[:-9],
    ],
)
def test_other_bytes_are_a_table_without_functions(data: bytes) -> None:
    table = PackedFunctions(data)
    assert len(table) == 0
    assert table.find(0) is None
    assert table.names(0) == []


@given(st.binary(max_size=200))
def test_no_bytes_raise(plain: bytes) -> None:
    table = PackedFunctions(zlib.compress(plain))
    for offset in (0, 1, 7, 1 << 31, 1 << 40):
        found = table.find(offset)
        assert found is None or found[0] <= offset < found[1]


def test_no_more_is_unpacked_than_a_module_can_have() -> None:
    bomb = zlib.compress(b"\1\0\0\0" + bytes(1 << 28), 9)
    table = PackedFunctions(bomb)
    assert table.find(0) is None
