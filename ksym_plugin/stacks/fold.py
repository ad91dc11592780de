"""``perf script`` text to folded stacks: ``task;root;…;leaf count``, one line a stack.

Frames come again and again, so how a line is spelled is kept, and a sample of known lines
is a few look-ups and a join.
"""

from __future__ import annotations

import re

from ksym_plugin.perf import text
from ksym_plugin.perf.annotate import SLOW, Weights
from ksym_plugin.perf.lines import Cutter
from ksym_plugin.stacks.pieces import Options, Pieces
from ksym_plugin.stacks.spelling import CONTROLS, task

__all__ = ["Folder", "Options", "Sums"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

    from ksym_plugin.perf.renaming import Renamer

_BRACKETED: Final = re.compile(rb"\[[^\]]*\]")
_LONGEST_COUNT: Final = 18


class Sums:
    """What a text was folded to: ``counts`` by stack.

    ``passed_over`` counts samples of other events, by event, and ``unparsed`` lines that
    are neither header nor frame.
    """

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}
        self.passed_over: dict[bytes, int] = {}
        self.unparsed = 0

    def add(self, other: Sums) -> None:
        """Take in the stacks of another part of the same text."""
        for mine, theirs in (
            (self.counts, other.counts),
            (self.passed_over, other.passed_over),
        ):
            for what, count in theirs.items():
                mine[what] = mine.get(what, 0) + count
        self.unparsed += other.unparsed

    def lines(self) -> Iterable[bytes]:
        """The folded stacks in order, each with its line end."""
        return (b"%s %d\n" % (stack, self.counts[stack]) for stack in sorted(self.counts))


class Folder:
    """Text in by ``feed``, ``close`` at its end; ``sums`` is the result.

    With a ``renamer`` kernel frames are repaired first.
    """

    def __init__(self, options: Options, renamer: Renamer | None = None) -> None:
        self.sums = Sums()
        #: The event that is counted, once it is known.
        self.event = options.event
        self._counts = self.sums.counts
        self._options = options
        self._renamer = renamer
        self._weights = Weights(renamer) if renamer is not None else None
        self._native = Pieces(options, False)
        self._java = Pieces(options, True)
        self._cutter = Cutter()
        #: Whether a sample can begin here: at the start, and after a blank line.
        self._is_start = True
        #: The sample at hand: its task, or None if it is of another event or has ended.
        self._task: bytes | None = None
        self._pieces = self._native
        self._period = 1
        self._stack: list[bytes] = []
        self._awaits_source = False

    def feed(self, data: bytes) -> None:
        _, whole, after = self._cutter.cut(data)
        self.sums.unparsed += bool(after)
        if whole:
            self._lines(whole)

    def close(self) -> None:
        rest = self._cutter.rest()
        if rest:
            self._line(rest)
        self._finish()

    def _lines(self, whole: bytes) -> None:
        pieces = whole[:-1].split(b"\n\n")
        last = len(pieces) - 1
        for at, piece in enumerate(pieces):
            if at:
                self._blank()
            # Of the last one more may follow.
            if not (self._is_start and at < last and self._sample(piece)):
                for line in piece.split(b"\n"):
                    self._line(line)

    def _sample(self, piece: bytes) -> bool:
        """Take a whole sample; False, and nothing done, if it does not begin with a header."""
        first, *lines = piece.split(b"\n")
        header = text.header(first)
        if header is None or header.payload.endswith(b")"):
            return False
        self._begin(header)
        if lines and not self._count(lines):
            for line in lines:
                self._line_within(line)
        return True

    def _line_within(self, line: bytes) -> None:
        """A line of a sample; how it is spelled may be known."""
        if self._is_start:  # After a line of blanks: this can be a header.
            self._line(line)
            return
        piece = self._pieces[line]
        weight = 0 if self._weights is None else self._weights[line]
        if piece is None or weight >= SLOW or self._task is None:
            self._line(line)
            return
        self._stack.append(piece)
        self._awaits_source = self._options.srcline
        if self._renamer is not None:
            self._renamer.count(weight)

    def _count(self, lines: list[bytes]) -> bool:
        """Count a sample with these frames; False, and nothing done, if they are no such."""
        stack = list(map(self._pieces.__getitem__, lines))
        if self._task is None:
            return None not in stack
        weight = sum(map(self._weights.__getitem__, lines)) if self._weights is not None else 0
        if weight >= SLOW:
            return False
        stack.append(self._task)
        stack.reverse()
        try:
            joined = b";".join(stack)  # type: ignore[arg-type]
        except TypeError:  # None is among them: much faster than to look for it.
            return False
        if self._renamer is not None:
            self._renamer.count(weight)
        self._counts[joined] = self._counts.get(joined, 0) + self._period
        self._task = None
        return True

    def _begin(self, header: text.Header) -> None:
        """A sample begins, and the one before has ended."""
        self._finish()
        self._is_start = False
        if header.event and header.event != self.event:
            if self.event is not None:
                others = self.sums.passed_over
                others[header.event] = others.get(header.event, 0) + 1
                return
            self.event = header.event
        if self._renamer is not None:
            self._renamer.begin(header)
        period = header.period
        self._period = (int(period) if len(period) <= _LONGEST_COUNT else 0) if period else 1
        self._period = self._period or 1
        name = header.comm
        if self._options.tid:
            name += b"-%s/%s" % (header.pid or b"?", header.tid)
        elif self._options.pid:
            name += b"-" + (header.pid or b"?")
        self._task = task(name)
        self._pieces = self._java if name.startswith(b"java") else self._native

    def _blank(self) -> None:
        """A blank line: the sample's end, if it is not one between its header and its frames."""
        self._is_start = True
        self._awaits_source = False
        if self._stack:
            self._finish()

    def _finish(self) -> None:
        """Count the sample at hand; one without any frame is its task's."""
        if self._task is not None:
            self._stack.append(self._task)
            self._stack.reverse()
            stack = b";".join(self._stack)
            self._counts[stack] = self._counts.get(stack, 0) + self._period
        self._stack = []
        self._task = None

    def _line(self, line: bytes) -> None:
        if not line.strip():
            self._blank()
            return
        parsed = text.parse(line, self._is_start)
        if isinstance(parsed, text.Header):
            self._begin(parsed)
            frame = text.payload_frame(line, parsed.payload)
            if frame is not None and self._task is not None:
                self._frame(line, frame)
        elif parsed is not None:
            if self._task is not None:
                self._frame(line, parsed)
        elif self._awaits_source:
            self._awaits_source = False
            self._source(line)
        else:
            if self._is_start:  # Whatever follows, the sample before has ended.
                self._finish()
            if not (line.startswith(b"#") or text.is_record(line) or text.is_source(line)):
                self.sums.unparsed += 1

    def _frame(self, line: bytes, frame: text.FrameLine) -> None:
        self._is_start = False
        if self._renamer is not None:
            line = self._renamer.replace(line, frame)
        # Of a frame behind a header the part that is its own.
        own = line[line.rindex(frame.digits, 0, frame.name_at) :]
        piece = self._pieces[b"\t" + b" " * (16 - len(frame.digits)) + own]
        if piece is not None:
            self._stack.append(piece)
            self._awaits_source = self._options.srcline

    def _source(self, line: bytes) -> None:
        """Where the last frame's code is; in brackets, an address where that is not known."""
        source = _BRACKETED.sub(b"", line).strip().translate(CONTROLS)
        if source and self._stack:
            self._stack[-1] += b":" + source
