"""The functions of a module, packed into bytes.

Offsets are relative to the module's code, so a module that is loaded again, wherever that
is, has the same bytes, and a history keeps them once.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Final

    #: Offset from the function's start, line, file, text of the line.
    LineRow = tuple[int, int, str, str]

    #: Offset of a function's start, its length, and a name; aliases follow the best name.
    FunctionRow = tuple[int, int, str]

_LINE_COLUMNS: Final = 4
_WORD: Final = 4
#: A program can have a million instructions, and so many rows at the most.
_MOST_BYTES: Final = 1 << 26


class Line:
    """A place in the source; ``text`` may be empty."""

    __slots__ = ("file", "line", "text")

    def __init__(self, file: str, line: int, text: str) -> None:
        self.file = file
        self.line = line
        self.text = text

    def __repr__(self) -> str:
        return f"Line({self.file}:{self.line})"


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
        while at >= first and not self._lines[at]:
            at -= 1
        if at < first:
            return None
        file, text = (self._string(column[at]) for column in (self._files, self._texts))
        return Line(file, self._lines[at], text)

    def _string(self, number: int) -> str:
        if number >= len(self._strings):
            return ""
        return self._strings[number].decode("utf-8", "backslashreplace")


def pack_lines(functions: Iterable[Iterable[LineRow]]) -> bytes:
    """The rows of each function, in the order of their offsets."""
    columns = [array("I") for _ in range(_LINE_COLUMNS)]
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
    header = array("I", (len(ends), len(offsets)))
    words = b"".join(portable(words).tobytes() for words in (header, ends, *columns))
    return zlib.compress(words + "\0".join(strings).encode("utf-8", "backslashreplace"))


def unpack_lines(data: bytes) -> LineTable:
    """What ``pack`` made; a table without rows of anything else."""
    try:
        plain = zlib.decompressobj().decompress(data, _MOST_BYTES)
    except zlib.error:
        plain = b""
    header = _words(plain, 0, 2)
    functions, rows = header if len(header) == 2 else (0, 0)
    if _WORD * (2 + functions + _LINE_COLUMNS * rows) > len(plain):
        functions = rows = 0
    ends = _words(plain, 2, functions)
    if any(end > rows for end in ends):
        functions = rows = 0
        ends = array("I")
    firsts = (2 + functions + rows * column for column in range(_LINE_COLUMNS))
    columns = [_words(plain, first, rows) for first in firsts]
    return LineTable(ends, columns, plain[_WORD * (2 + functions + _LINE_COLUMNS * rows) :])


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


_COLUMNS: Final = 2
#: The largest modules have some 10,000 functions, whose names make half a megabyte.
#: Of the functions that begin before an offset, so many are asked whether they reach it.
_MOST_BACK: Final = 64


class PackedFunctions:
    """What ``pack`` made; none of anything else."""

    __slots__ = ("_lengths", "_names", "_starts", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._starts: array[int] | None = None
        self._lengths: array[int]
        self._names: list[bytes]

    def __len__(self) -> int:
        return len(self._unpacked())

    @property
    def digest(self) -> bytes:
        """The same for the same functions."""
        # Here, because who only looks up has no use for it.
        from hashlib import blake2b

        return blake2b(self.data, digest_size=16).digest()

    def find(self, offset: int) -> tuple[int, int, str] | None:
        """Start, end and name of the function at an offset, if there is one."""
        at = self._index(offset)
        if at < 0:
            return None
        start = self._unpacked()[at]
        return start, start + self._lengths[at], self._name(at)

    def names(self, offset: int) -> list[str]:
        """All names of the function at an offset, the best first."""
        at = self._index(offset)
        if at < 0:
            return []
        starts = self._unpacked()
        return [self._name(each) for each in range(at, bisect_right(starts, starts[at]))]

    def is_like(self, other: PackedFunctions) -> bool:
        """Whether both have the same names at the same places; lengths may be another source's."""
        mine, theirs = self._unpacked(), other._unpacked()
        return set(zip(mine, self._names)) == set(zip(theirs, other._names))

    def _index(self, offset: int) -> int:
        """The first row of the function at an offset; -1 if there is none."""
        starts = self._unpacked()
        at = bisect_right(starts, offset) - 1
        for index in range(at, max(at - _MOST_BACK, -1), -1):
            if offset - starts[index] < self._lengths[index]:
                return bisect_left(starts, starts[index])
        return -1

    def _name(self, index: int) -> str:
        return self._names[index].decode("utf-8", "backslashreplace")

    def _unpacked(self) -> array[int]:
        """The starts; they and all else are unpacked once they are asked for."""
        if self._starts is None:
            self._starts, self._lengths, self._names = _unpack_functions(self.data)
        return self._starts


def pack_functions(functions: Iterable[FunctionRow]) -> bytes:
    """Functions in the order of their starts."""
    starts, lengths = array("I"), array("I")
    names: list[str] = []
    for start, length, name in functions:
        starts.append(start)
        lengths.append(length)
        names.append(name)
    words = (array("I", (len(names),)), starts, lengths)
    plain = b"".join(portable(column).tobytes() for column in words)
    return zlib.compress(plain + "\0".join(names).encode("utf-8", "backslashreplace"))


def _unpack_functions(data: bytes) -> tuple[array[int], array[int], list[bytes]]:
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, _MOST_BYTES)
    except zlib.error:
        plain = b""
    if not unpacker.eof:
        plain = b""  # Cut off, which a name would be as well.
    count = int.from_bytes(plain[:_WORD], "little")
    ends = [_WORD * (1 + count * columns) for columns in range(_COLUMNS + 1)]
    names = plain[ends[-1] :].split(b"\0")
    if len(plain) < ends[-1] or len(names) != count:
        return array("I"), array("I"), []
    columns = []
    for first, last in zip(ends, ends[1:]):
        columns.append(array("I"))
        columns[-1].frombytes(plain[first:last])
    starts, lengths = map(portable, columns)
    return starts, lengths, names
