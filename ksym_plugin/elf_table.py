"""The functions of an ELF file as a table in arrays: whole in a few milliseconds."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from operator import le, lt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    #: Start, size, binding, and where the name is.
    Row = tuple[int, int, int, int]

TOP: Final = (1 << 64) - 1
_DOLLAR: Final = 36
_LOCAL: Final = 0
_WEAK: Final = 2
#: How far behind the nearest symbol one is looked for that is still long enough.
_MOST_BACK: Final = 64
#: Longer names are cut: of a damaged file all could be as long as the file is.
_LONGEST: Final = 4096


class FunctionTable:
    """One function a start, sorted; ``reaches`` are the first and past addresses of sections."""

    __slots__ = ("_aliased", "_aliases", "_ends", "_names", "_reaches", "_strings", "starts")

    #: How many parts ``parts`` gives.
    PARTS: Final = 7

    def __init__(self, rows: list[Row], strings: bytes, reaches: Sequence[tuple[int, int]]) -> None:
        """``strings`` ends with a NUL, and rows' names are within it."""
        chosen, others = _chosen(rows, strings)
        #: Where functions begin, ascending.
        self.starts = array("Q", chosen)
        self._ends = array("Q", [min(row[0] + row[1], TOP) for row in chosen.values()])
        self._names = array("I", [row[3] for row in chosen.values()])
        # The names that were not chosen, and the starts of theirs.
        self._aliased = array("Q", [start for start, names in others.items() for _ in names])
        self._aliases = array("I", [name for names in others.values() for name in names])
        self._strings = strings
        self._reaches = array("Q", [bound for reach in reaches for bound in reach])

    @classmethod
    def of_parts(cls, parts: Sequence[bytes]) -> FunctionTable:
        """The table that gave these parts; ValueError for what none can have given."""
        table = cls.__new__(cls)
        arrays = []
        for code, part in zip("QQIQIQ", parts):
            arrays.append(array(code))
            arrays[-1].frombytes(part)
        table.starts, table._ends, table._names = arrays[:3]
        table._aliased, table._aliases, table._reaches = arrays[3:]
        table._strings = parts[6]
        table._check()
        return table

    def parts(self) -> list[bytes]:
        """All of it in bytes, for the same kind of machine."""
        arrays = (self.starts, self._ends, self._names, self._aliased, self._aliases, self._reaches)
        return [*(one.tobytes() for one in arrays), self._strings]

    def _check(self) -> None:
        starts, ends, names = self.starts, self._ends, self._names
        rising = iter(starts)
        next(rising, None)
        if not (
            len(starts) == len(ends) == len(names)
            and len(self._aliased) == len(self._aliases)
            and len(self._reaches) % 2 == 0
            and all(map(lt, starts, rising))
            and all(map(le, starts, ends))
            and self._strings[-1:] == b"\0"
            and max((*names, *self._aliases), default=0) < len(self._strings)
        ):
            raise ValueError("no table of functions")

    def __len__(self) -> int:
        return len(self.starts)

    def find(self, address: int) -> tuple[int, int, str] | None:
        """Start, end and name of the function at a linked address, if there is one.

        A function of a known size has all bytes within it. One without, as those written
        in assembly may be, goes on to the next symbol or to the end of its section.
        """
        at = bisect_right(self.starts, address) - 1
        open_at = -1
        for index in range(at, max(at - _MOST_BACK, -1), -1):
            if self._ends[index] == self.starts[index]:
                open_at = index if index == at else open_at
            elif address < self._ends[index]:
                return self.starts[index], self._ends[index], self._name(index)
        return None if open_at < 0 else self._find_open(open_at, address)

    def _find_open(self, index: int, address: int) -> tuple[int, int, str] | None:
        start = self.starts[index]
        after = self.starts[index + 1] if index + 1 < len(self.starts) else TOP
        for first, last in zip(self._reaches[::2], self._reaches[1::2]):
            if first <= start < last:
                end = min(after, last)
                return (start, end, self._name(index)) if address < end else None
        return None

    def is_open(self, start: int) -> bool:
        """Whether the file does not say how long the function at ``start`` is."""
        at = bisect_right(self.starts, start) - 1
        return at >= 0 and self.starts[at] == start == self._ends[at]

    def aliases(self, start: int) -> list[str]:
        """The other names of the function that begins there, the best first."""
        held = range(bisect_left(self._aliased, start), bisect_right(self._aliased, start))
        return [self._decoded(self._aliases[index]) for index in held]

    def _name(self, index: int) -> str:
        return self._decoded(self._names[index])

    def _decoded(self, at: int) -> str:
        return _string(self._strings, at).decode("utf-8", "backslashreplace")


def _chosen(rows: list[Row], strings: bytes) -> tuple[dict[int, Row], dict[int, list[int]]]:
    """By starts, ascending: the row of the best name, as kallsyms prefers them; and where the
    other names are, the best first."""
    if b"\0$" in strings:
        # ARM's and AArch64's marks of where code and literals begin.
        rows = [row for row in rows if strings[row[3]] != _DOLLAR]
    rows.sort()
    chosen = {row[0]: row for row in rows}
    others: dict[int, list[int]] = {}
    if len(chosen) == len(rows):
        return chosen, others
    shared = {row[0] for row, after in zip(rows, rows[1:]) if row[0] == after[0]}
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row[0] in shared:
            groups.setdefault(row[0], []).append(row)
    for start, group in groups.items():
        best, *rest = sorted(group, key=lambda row: _preference(row, strings))
        chosen[start] = (start, max(row[1] for row in group), best[2], best[3])
        others[start] = [row[3] for row in rest]
    return chosen, others


def _preference(row: Row, strings: bytes) -> tuple[bool, bool, bool, int, int, bytes]:
    _, size, binding, at = row
    name = _string(strings, at)
    underscores = len(name) - len(name.lstrip(b"_"))
    return not size, binding == _WEAK, binding == _LOCAL, underscores, -len(name), name


def _string(strings: bytes, at: int) -> bytes:
    return strings[at : at + _LONGEST].partition(b"\0")[0]
