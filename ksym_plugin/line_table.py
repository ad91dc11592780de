"""Source lines of a BPF program's functions, packed into bytes.

The kernel keeps for each program which source line its instructions come from, with the
line's text (bpf_line_info and BTF, Documentation/bpf/btf.rst), and forgets it with the
program. Offsets here are relative to a function's start, so a program that is loaded
again has the same bytes, and a history keeps them once.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Final

    #: Offset from the function's start, line, column, file, text of the line.
    Row = tuple[int, int, int, str, str]

_COLUMNS: Final = 4
_COLUMN_BITS: Final = 10
_WORD: Final = 4
#: A program can have a million instructions, and so many rows at the most.
_MOST_BYTES: Final = 1 << 26


class Line:
    """A place in the source. ``column`` is 0 where it is not known, ``text`` may be empty."""

    __slots__ = ("column", "file", "line", "text")

    def __init__(self, file: str, line: int, column: int, text: str) -> None:
        self.file = file
        self.line = line
        self.column = column
        self.text = text

    def __repr__(self) -> str:
        return f"Line({self.file}:{self.line}:{self.column})"


class LineTable:
    """The rows of all functions of a program; see ``pack`` and ``unpack``."""

    __slots__ = ("_ends", "_files", "_lines", "_offsets", "_strings", "_texts")

    def __init__(self, ends: Sequence[int], columns: Sequence[array[int]], strings: bytes) -> None:
        self._ends = ends
        self._offsets, self._lines, self._files, self._texts = columns
        self._strings = strings.split(b"\0")

    def __len__(self) -> int:
        return len(self._offsets)

    def find(self, function: int, offset: int) -> Line | None:
        """The line of the instruction at ``offset`` in a function, counted as they were packed.

        Code that the compiler made up has line 0 and counts to the line before it.
        """
        if not 0 <= function < len(self._ends):
            return None
        first = self._ends[function - 1] if function else 0
        at = bisect_right(self._offsets, offset, first, self._ends[function]) - 1
        while at >= first and not self._lines[at] >> _COLUMN_BITS:
            at -= 1
        if at < first:
            return None
        place = self._lines[at]
        file, text = (self._string(column[at]) for column in (self._files, self._texts))
        return Line(file, place >> _COLUMN_BITS, place & ((1 << _COLUMN_BITS) - 1), text)

    def _string(self, number: int) -> str:
        if number >= len(self._strings):
            return ""
        return self._strings[number].decode("utf-8", "backslashreplace")


def pack(functions: Iterable[Iterable[Row]]) -> bytes:
    """The rows of each function, in the order of their offsets."""
    columns = [array("I") for _ in range(_COLUMNS)]
    offsets, lines, files, texts = columns
    strings: dict[str, int] = {}
    ends = array("I")
    for rows in functions:
        for offset, line, column, file, text in rows:
            offsets.append(offset)
            lines.append(line << _COLUMN_BITS | column)
            files.append(strings.setdefault(file, len(strings)))
            texts.append(strings.setdefault(text, len(strings)))
        ends.append(len(offsets))
    header = array("I", (len(ends), len(offsets)))
    words = b"".join(portable(words).tobytes() for words in (header, ends, *columns))
    return zlib.compress(words + "\0".join(strings).encode("utf-8", "backslashreplace"))


def unpack(data: bytes) -> LineTable:
    """What ``pack`` made; a table without rows of anything else."""
    try:
        plain = zlib.decompressobj().decompress(data, _MOST_BYTES)
    except zlib.error:
        plain = b""
    header = _words(plain, 0, 2)
    functions, rows = header if len(header) == 2 else (0, 0)
    if _WORD * (2 + functions + _COLUMNS * rows) > len(plain):
        functions = rows = 0
    ends = _words(plain, 2, functions)
    if any(end > rows for end in ends):
        functions = rows = 0
        ends = array("I")
    firsts = (2 + functions + rows * column for column in range(_COLUMNS))
    columns = [_words(plain, first, rows) for first in firsts]
    return LineTable(ends, columns, plain[_WORD * (2 + functions + _COLUMNS * rows) :])


def _words(data: bytes, first: int, number: int) -> array[int]:
    part = data[_WORD * first : _WORD * (first + number)]
    words = array("I")
    words.frombytes(part[: len(part) - len(part) % _WORD])
    return portable(words)


def portable(words: array[int]) -> array[int]:
    """Little-endian where it is stored: histories go from host to host."""
    if sys.byteorder != "little":
        words.byteswap()
    return words
