"""Packed columns: line tables and function tables come out as they went in; no bytes do harm.

A line table is held against a linear search over the rows that it was made of.
"""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.program import LineTable, pack_lines, unpack_lines
from ksym_plugin.timeline.symbols import SourceLocation

Row = tuple[int, int, str, str]

_ROWS = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.sampled_from([0, 0, 1, 7, 40_000, (1 << 22) - 1]),
        st.sampled_from(["a.c", "/src/b.h", "", "d\u00e9\u20ac.c"]),
        st.sampled_from(["", "return 0;", "  x = y;\t// \u00e4"]),
    ),
    max_size=12,
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


def slowly(rows: list[Row], offset: int) -> Row | None:
    """The last row at or before the offset that has a line."""
    return ([None] + [row for row in rows if row[0] <= offset and row[1]])[-1]


@given(st.lists(_ROWS, max_size=5), st.integers(0, 6), st.integers(0, 320))
def test_finds_what_a_linear_search_finds(
    functions: list[list[Row]], number: int, offset: int
) -> None:
    table = unpack_lines(pack_lines(functions))
    wanted = slowly(functions[number], offset) if number < len(functions) else None
    found = table.find(number, offset)
    assert len(table) == sum(map(len, functions))
    if found is None or wanted is None:
        assert found is wanted
    else:
        assert (found.line, found.file, found.text) == wanted[1:]


def test_line_zero_counts_to_the_line_before_in_the_same_function() -> None:
    table = unpack_lines(
        pack_lines([[(0, 5, "a.c", "f")], [(0, 0, "a.c", ""), (8, 9, "a.c", "g")]])
    )
    assert table.find(1, 4) is None
    assert str(table.find(1, 8)) == "SourceLocation(a.c:9)"
    assert table.find(-1, 0) is None


def test_lines_of_histories_that_kept_columns_too() -> None:
    """Of ``(0, 12, column 5)`` and ``(8, 13, column 1)``: in a history they stay as they are."""
    table = unpack_lines(
        bytes.fromhex(
            "789c6364606060826210e0006256030606461306386084ca27ea253314a5969416e529185833d4020037db0515"
        )
    )
    assert str(table.find(0, 4)) == "SourceLocation(a.c:12)"
    assert table.find(0, 9) == SourceLocation("a.c", 13, "}")


def test_same_rows_make_the_same_bytes() -> None:
    rows = [[(0, 5, "a.c", "f"), (9, 6, "a.c", "g")]]
    assert pack_lines(rows) == pack_lines([list(rows[0])])


@given(st.binary(max_size=200))
def test_any_bytes_unpack_to_something_harmless(data: bytes) -> None:
    for table in (unpack_lines(data), unpack_lines(zlib.compress(data))):
        assert isinstance(table, LineTable)
        for function in range(4):
            table.find(function, 77)


@given(st.lists(_ROWS, min_size=1, max_size=3), st.data())
def test_a_damaged_table_is_harmless(functions: list[list[Row]], data: st.DataObject) -> None:
    plain = bytearray(zlib.decompress(pack_lines(functions)))
    at = data.draw(st.integers(0, len(plain) - 1))
    plain[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(plain)))
    for damaged in (plain, plain[:cut]):
        table = unpack_lines(zlib.compress(bytes(damaged)))
        for function in range(4):
            table.find(function, 77)


# Functions

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
