"""A compile unit's line program (DWARF, section 6.2) run into rows.

pyelftools' own rows are objects of some hundred bytes and take ten times as long; a kernel
has six million of them.
"""

from __future__ import annotations

from array import array
from operator import itemgetter

from ksym_plugin.leb128 import signed, unsigned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from ksym_plugin.line_header import Header

    #: Address, line, column, and the file's number.
    _Row = tuple[int, int, int, int]

#: The line of what no line is known for, as behind the end of a sequence.
NO_LINE: Final = 0

_END_SEQUENCE: Final = 1
_SET_ADDRESS: Final = 2
_COPY: Final = 1
_ADVANCE_PC: Final = 2
_ADVANCE_LINE: Final = 3
_SET_FILE: Final = 4
_SET_COLUMN: Final = 5
_CONST_ADD_PC: Final = 8
_FIXED_ADVANCE_PC: Final = 9
_WORD: Final = (1 << 32) - 1
#: Addresses have no more bytes, and their sums take no longer.
_WIDEST: Final = 8


class Rows:
    """All rows by address; at one address the last is what counts."""

    __slots__ = ("addresses", "columns", "files", "lines")

    def __init__(self, header: Header, code: bytes) -> None:
        """``code`` is the program's, from ``header.start`` to ``header.end``."""
        # By where they begin and end, so that an end comes before what begins there.
        sequences = sorted(_sequences(header, code), key=lambda rows: (rows[0][0], rows[-1][0]))
        rows = [row for sequence in sequences for row in sequence]
        rows.sort(key=itemgetter(0))
        self.addresses = array("Q", [row[0] for row in rows])
        # What is out of range no compiler writes: such a line is not known.
        self.lines = array("I", [row[1] if 0 < row[1] <= _WORD else NO_LINE for row in rows])
        self.columns = array("I", [min(row[2], _WORD) for row in rows])
        self.files = array("I", [min(row[3], _WORD) for row in rows])


def _sequences(  # noqa: C901, PLR0912 - an opcode a branch
    header: Header, code: bytes
) -> Iterator[list[_Row]]:
    """The rows of each sequence, as the program appends them."""
    first_special, unit, order = header.first_special, header.unit, header.order
    base, span = header.base, header.span
    steps = [
        (unit * (number // span), base + number % span) for number in range(256 - first_special)
    ]
    lengths = header.lengths
    rows: list[_Row] = []
    address, line, column, file = 0, 1, 0, 1
    at, end = 0, len(code)
    while at < end:
        opcode = code[at]
        at += 1
        if opcode >= first_special:
            ahead, down = steps[opcode - first_special]
            address += ahead
            line += down
            rows.append((address, line, column, file))
        elif opcode == _SET_COLUMN:
            column, at = unsigned(code, at)
        elif opcode == _ADVANCE_LINE:
            down, at = signed(code, at)
            line += down
        elif opcode == _COPY:
            rows.append((address, line, column, file))
        elif opcode == _ADVANCE_PC:
            ahead, at = unsigned(code, at)
            address += unit * ahead
        elif opcode == _SET_FILE:
            file, at = unsigned(code, at)
        elif opcode == _CONST_ADD_PC:
            address += steps[255 - first_special][0]
        elif opcode == _FIXED_ADVANCE_PC:
            address += int.from_bytes(code[at : at + 2], order)
            at += 2
        elif opcode == 0:
            size, at = unsigned(code, at)
            at += size
            if code[at - size] == _END_SEQUENCE:
                yield [*rows, (address, NO_LINE, 0, 0)]
                rows, address, line, column, file = [], 0, 1, 0, 1
            elif code[at - size] == _SET_ADDRESS:
                if size > 1 + _WIDEST:
                    raise ValueError(size)
                address = int.from_bytes(code[at - size + 1 : at], order)
        else:
            at = _skipped(code, at, lengths[opcode - 1])


def _skipped(code: bytes, at: int, count: int) -> int:
    for _ in range(count):
        _, at = unsigned(code, at)
    return at
