"""What is known of a BPF program beside its symbols: its details and its source lines."""

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

#: Why there are no lines, if there are none.
GONE = "it was gone before its lines could be read"
HIDDEN = "the kernel does not show its addresses"
NOT_JITED = "it is not JITed"
WITHOUT = "loaded without line information"
_COLUMNS = 4
#: As in the kernel's bpf_line_info, a number of 22 bits stands above ten bits of the column
#: (include/uapi/linux/bpf.h), which are not kept: histories of either kind are read alike.
_LINE_SHIFT = 10


class ProgramDetails:
    """One program, as bpf(2) describes it.

    ``functions`` are (start, length, name) of the main function and its subprograms in
    the kernel's order, with names as in kallsyms, ``""`` where not known. ``load_time`` is
    CLOCK_MONOTONIC ns, never later than the true start of its BPF_PROG_LOAD. ``lines`` is
    what ``pack_lines`` made of the functions, and ``digest`` its digest; or both are empty,
    and ``problem`` says why. ``target`` is the kernel function that a tracing program is
    attached to, ``trampoline`` the key in the name of the trampoline there; ``""`` and 0 for
    other programs. Of a program that was gone when it was asked about, only the id is known.
    """

    def __init__(self, id: int, problem: str) -> None:
        self.id = id
        self.problem = problem
        self.tag = ""
        self.type = 0
        self.uid = 0
        self.load_time = 0
        self.functions: list[tuple[int, int, str]] = []
        self.lines = b""
        self.digest = b""
        self.trampoline = 0
        self.target = ""

    def __repr__(self) -> str:
        return f"ProgramDetails({self.id}, {self.tag}, {self.problem or len(self.lines)})"


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
        while at >= first and not self._lines[at] >> _LINE_SHIFT:
            at -= 1
        if at < first:
            return None
        file, text = (self._string(column[at]) for column in (self._files, self._texts))
        return SourceLocation(file, self._lines[at] >> _LINE_SHIFT, text)

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
            lines.append(line << _LINE_SHIFT)
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
