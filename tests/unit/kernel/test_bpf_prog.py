"""Rows of bpf_line_info given to functions, held against the rule they follow."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.kernel.bpf_prog import rows_of, rows_with_lines

BASE = 0xFFFF_FFFF_C000_0000


@st.composite
def functions(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(start, length), apart from each other and in no order of addresses."""
    slots = draw(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6))
    return [(BASE + 0x100 * slot, draw(st.integers(1, 0x100))) for slot in slots]


@given(functions(), st.lists(st.integers(-4, 0xA10), max_size=30))
def test_a_row_belongs_to_the_function_that_holds_its_address(
    held: list[tuple[int, int]], offsets: list[int]
) -> None:
    addresses = [BASE + offset for offset in offsets]
    found = rows_of(held, addresses)
    assert len(found) == len(addresses)
    for address, (number, offset) in zip(addresses, found):
        holders = [n for n, (start, size) in enumerate(held) if start <= address < start + size]
        assert holders == ([] if number < 0 else [number])
        assert not holders or held[number][0] + offset == address


def blob_with(strings: bytes) -> bytes:
    return struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, 0, 0, len(strings)) + strings


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 9, 700]),
            st.integers(0, (1 << 22) - 1),
            st.integers(0, 1023),
            st.integers(-1, 2),
            st.integers(0, 50),
        ),
        max_size=20,
    )
)
def test_lines_and_columns_are_taken_apart(rows: list[tuple[int, int, int, int, int]]) -> None:
    blob = blob_with(b"\0file.c\0\0  text \0")
    records = b"".join(
        struct.pack("<IIII", 0, 1, text, line << 10 | column) for text, line, column, *_ in rows
    )
    found = rows_with_lines(records, [(number, at) for *_, number, at in rows], 3, blob)
    texts = {0: "", 1: "file.c", 9: "text", 700: ""}
    for number in range(3):
        own = [row for row in rows if row[3] == number]
        wanted = [
            (at, line, "file.c", texts[text])
            for text, line, _, _, at in sorted(own, key=lambda row: row[4])
        ]
        assert found[number] == wanted


def test_a_blob_that_is_no_btf_gives_no_names() -> None:
    records = struct.pack("<IIII", 0, 1, 5, 7 << 10 | 3)
    assert rows_with_lines(records, [(0, 4)], 1, b"") == [[(4, 7, "", "")]]
