"""Columns of numbers and text packed into bytes, and a module's functions packed so."""

from __future__ import annotations

import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from functools import cached_property

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    #: Offset of a function's start, its length, and a name; aliases follow the best name.
    FunctionRow = tuple[int, int, str]

_WORD = 4
#: A program can have a million instructions, and so many rows at the most. The largest
#: modules have some 10,000 functions, whose names make half a megabyte.
_MOST_BYTES = 1 << 26
#: How many of the functions that begin before an offset are checked for reaching it.
_MOST_BACK = 64


def pack_columns(groups: Sequence[Sequence[array[int]]], strings: Iterable[str]) -> bytes:
    """Columns of 32-bit numbers and strings without NUL, compressed.

    The columns of a group are of one length. The lengths go first, one a group, then the
    columns, then the strings with a NUL between them.
    """
    lengths = array("I", [len(group[0]) for group in groups])
    columns = (lengths, *(column for group in groups for column in group))
    words = b"".join(portable(column).tobytes() for column in columns)
    return zlib.compress(words + "\0".join(strings).encode("utf-8", "backslashreplace"))


def unpack_columns(data: bytes, groups: Sequence[int]) -> tuple[list[array[int]], list[bytes]]:
    """The columns and the strings of what ``pack_columns`` made; empty ones for other bytes.

    ``groups`` says how many columns each group has.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, _MOST_BYTES)
    except zlib.error:
        plain = b""
    if not unpacker.eof:
        # It is damaged, cut off or too long.
        plain = b""
    words = portable(array("I", plain[: len(plain) // _WORD * _WORD]))
    sizes = [size for size, columns in zip(words, groups) for _ in range(columns)]
    at = len(groups)
    if at + sum(sizes) > len(words):
        return [array("I") for _ in range(sum(groups))], []
    columns = []
    for size in sizes:
        columns.append(words[at : at + size])
        at += size
    return columns, plain[_WORD * at :].split(b"\0")


def portable(words: array[int]) -> array[int]:
    """In little-endian order, as they are stored: histories go from host to host."""
    if sys.byteorder != "little":
        words.byteswap()
    return words


def text_of(string: bytes) -> str:
    """A string as it was packed."""
    return string.decode("utf-8", "backslashreplace")


def digest_of(packed: bytes) -> bytes:
    """The digest by which equal tables are stored once."""
    # Imported here: looking up does not need it.
    from hashlib import blake2b

    return blake2b(packed, digest_size=16).digest()


class PackedFunctions:
    """The functions of a module, packed by ``pack_functions``; none from any other bytes.

    Offsets are relative to the module's code, so a module that is loaded again, wherever
    that is, has the same bytes, and a history keeps them once.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def _columns(self) -> tuple[array[int], array[int], list[bytes]]:
        """Starts, lengths and names, unpacked once they are asked for."""
        (starts, lengths), names = unpack_columns(self.data, (2,))
        if len(names) != len(starts):
            return array("I"), array("I"), []
        return starts, lengths, names

    def __len__(self) -> int:
        return len(self._columns[0])

    @property
    def digest(self) -> bytes:
        """The same for the same functions."""
        return digest_of(self.data)

    def find(self, offset: int) -> tuple[int, int, str] | None:
        """Start, end and name of the function at an offset, if there is one."""
        starts, lengths, names = self._columns
        at = self._index(offset)
        if at < 0:
            return None
        return starts[at], starts[at] + lengths[at], text_of(names[at])

    def names(self, offset: int) -> list[str]:
        """All names of the function at an offset, the best first."""
        starts, _, names = self._columns
        at = self._index(offset)
        last = bisect_right(starts, starts[at]) if at >= 0 else at
        return [text_of(name) for name in names[at:last]]

    def is_like(self, other: PackedFunctions) -> bool:
        """Whether both have the same names at the same offsets, whatever the lengths."""
        (mine, _, names), (theirs, _, other_names) = self._columns, other._columns
        return set(zip(mine, names)) == set(zip(theirs, other_names))

    def _index(self, offset: int) -> int:
        """The first row of the function at an offset; -1 if there is none."""
        starts, lengths, _ = self._columns
        at = bisect_right(starts, offset) - 1
        for index in range(at, max(at - _MOST_BACK, -1), -1):
            if offset - starts[index] < lengths[index]:
                return bisect_left(starts, starts[index])
        return -1


def pack_functions(functions: Iterable[FunctionRow]) -> bytes:
    """Functions in the order of their starts."""
    rows = list(functions)
    starts = array("I", [start for start, _, _ in rows])
    lengths = array("I", [length for _, length, _ in rows])
    return pack_columns([(starts, lengths)], [name for _, _, name in rows])
