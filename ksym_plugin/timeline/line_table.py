"""The table of the source lines that a BPF program was loaded with."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from ksym_plugin.timeline.packed import pack_columns, text_of, unpack_columns
from ksym_plugin.timeline.symbols import SourceLocation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    #: Offset from the function's start, line, file, text of the line.
    LineRow = tuple[int, int, str, str]

_COLUMNS = 4


class LineTable:
    """The source locations in all functions of a program; see ``unpack_lines``."""

    __slots__ = ("_ends", "_files", "_lines", "_offsets", "_strings", "_texts")

    def __init__(
        self, ends: Sequence[int], columns: Sequence[array[int]], strings: Sequence[bytes]
    ) -> None:
        self._ends = ends
        self._offsets, self._lines, self._files, self._texts = columns
        self._strings = strings

    def __len__(self) -> int:
        return len(self._offsets)

    def find(self, function: int, offset: int) -> SourceLocation | None:
        """Where the instruction at ``offset`` in a function comes from.

        Functions are counted in the order in which they were packed. Code that the compiler
        made up has line 0 and counts to the line before it.
        """
        if not 0 <= function < len(self._ends):
            return None
        first = self._ends[function - 1] if function else 0
        at = bisect_right(self._offsets, offset, first, self._ends[function]) - 1
        while at >= first and not self._lines[at]:
            at -= 1
        if at < first:
            return None
        file, text = (self._string(column[at]) for column in (self._files, self._texts))
        return SourceLocation(file, self._lines[at], text)

    def _string(self, number: int) -> str:
        return text_of(self._strings[number]) if number < len(self._strings) else ""


def pack_lines(functions: Iterable[Iterable[LineRow]]) -> bytes:
    """The rows of each function, in the order of their offsets."""
    columns = [array("I") for _ in range(_COLUMNS)]
    offsets, lines, files, texts = columns
    strings: dict[str, int] = {}
    ends = array("I")
    for rows in functions:
        for offset, line, file, text in rows:
            offsets.append(offset)
            lines.append(line)
            files.append(strings.setdefault(file, len(strings)))
            texts.append(strings.setdefault(text, len(strings)))
        ends.append(len(offsets))
    return pack_columns([(ends,), columns], strings)


def unpack_lines(data: bytes) -> LineTable:
    """The table that ``pack_lines`` made; one without rows from any other bytes."""
    (ends, *columns), strings = unpack_columns(data, (1, _COLUMNS))
    if any(end > len(columns[0]) for end in ends):
        ends, columns = array("I"), [array("I") for _ in range(_COLUMNS)]
    return LineTable(ends, columns, strings)
