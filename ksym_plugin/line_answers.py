"""What was told of a file's lines, by linked address, kept for the next time.

A profile has the same few thousand addresses each time it is looked at. To find their lines
anew means to read all of the kernel's DWARF, and the line program of every unit they are in.
"""

from __future__ import annotations

from array import array

from ksym_plugin import cache_file
from ksym_plugin.timeline.packed import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_CACHED: Final = "lines"
#: Addresses, and of each the file's number, the line (0: none is known) and the column; files.
_CODES: Final = "QIII"
#: So many are kept; some 30 bytes each.
MOST: Final = 1 << 18


class Answers:
    """Lines by address; of None it is known that there is no line."""

    def __init__(self, identity: tuple[int, ...] | None) -> None:
        """``identity`` is the file's (see cache_file), None where nothing is to be kept."""
        self._identity = identity
        self._has_news = False
        self.known: dict[int, Line | None] = {}
        parts = identity and cache_file.load(_CACHED, identity, len(_CODES) + 1)
        if parts:
            self.known = _unpacked(parts)

    def add(self, address: int, line: Line | None) -> None:
        if len(self.known) < MOST:
            self.known[address] = line
            self._has_news = True

    def store(self) -> None:
        """Keep what is known, if some of it is new."""
        if self._has_news and self._identity is not None:
            cache_file.store(_CACHED, self._identity, _packed(self.known))
            self._has_news = False


def _packed(known: dict[int, Line | None]) -> list[bytes]:
    files = {"": 0}
    columns = [array(code) for code in _CODES]
    for address, line in known.items():
        if line is None:
            row = (address, 0, 0, 0)
        else:
            number = files.setdefault(line.file, len(files))
            row = (address, number, line.line, line.column)
        for column, value in zip(columns, row):
            column.append(value)
    names = "\0".join(files).encode("utf-8", "backslashreplace")
    return [*(column.tobytes() for column in columns), names]


def _unpacked(parts: list[bytes]) -> dict[int, Line | None]:
    """Nothing for what was not packed here."""
    names = parts[-1].decode("utf-8", "backslashreplace").split("\0")
    columns = [array(code) for code in _CODES]
    try:
        for column, part in zip(columns, parts):
            column.frombytes(part)
        if len({len(column) for column in columns}) != 1:
            return {}
        return {
            address: Line(names[number], line, at, "") if line else None
            for address, number, line, at in zip(*columns)
        }
    except (ValueError, IndexError):
        return {}
