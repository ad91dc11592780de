"""Packed line tables, held against a linear search over the rows they were made of."""

from __future__ import annotations

import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.timeline.line_table import LineTable, pack_lines, unpack_lines

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
@settings(deadline=None)
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


def test_same_rows_make_the_same_bytes() -> None:
    rows = [[(0, 5, "a.c", "f"), (9, 6, "a.c", "g")]]
    assert pack_lines(rows) == pack_lines([list(rows[0])])


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_unpack_to_something_harmless(data: bytes) -> None:
    for table in (unpack_lines(data), unpack_lines(zlib.compress(data))):
        assert isinstance(table, LineTable)
        for function in range(4):
            table.find(function, 77)


@given(st.lists(_ROWS, min_size=1, max_size=3), st.data())
@settings(deadline=None)
def test_a_damaged_table_is_harmless(functions: list[list[Row]], data: st.DataObject) -> None:
    plain = bytearray(zlib.decompress(pack_lines(functions)))
    at = data.draw(st.integers(0, len(plain) - 1))
    plain[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(plain)))
    for damaged in (plain, plain[:cut]):
        table = unpack_lines(zlib.compress(bytes(damaged)))
        for function in range(4):
            table.find(function, 77)
