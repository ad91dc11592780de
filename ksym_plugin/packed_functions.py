"""The functions of a module, packed into bytes.

Offsets are relative to the module's code, so a module that is loaded again, wherever that
is, has the same bytes, and a history keeps them once.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right

from ksym_plugin.line_table import portable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

    #: Offset of a function's start, its length, and a name; aliases follow the best name.
    Row = tuple[int, int, str]

_COLUMNS: Final = 2
_WORD: Final = 4
#: The largest modules have some 10,000 functions, whose names make half a megabyte.
_MOST_BYTES: Final = 1 << 26
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
            self._starts, self._lengths, self._names = _unpack(self.data)
        return self._starts


def pack(functions: Iterable[Row]) -> bytes:
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


def _unpack(data: bytes) -> tuple[array[int], array[int], list[bytes]]:
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
