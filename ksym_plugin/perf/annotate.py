"""``perf script`` text with its kernel frames repaired, every other byte as it was.

A filter: what is fed in comes out as soon as its line is whole. Most of a profile is
frames that stay as they are, each printed many times; so what a line is gets kept, and a
sample of such lines passes in one piece.
"""

from __future__ import annotations

import re

from ksym_plugin.perf import text
from ksym_plugin.perf.lines import Cutter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.perf.renaming import Renamer

#: What is kept of lines: how many, and how long at the most.
_MOST: Final = 1 << 17
_KEPT: Final = 1 << 10
#: A user frame as perf prints it: most of them, at a glance.
_USER: Final = re.compile(rb"\t *(?:[0-9a-f]{1,15}|[0-7][0-9a-f]{15}) .* \(.*\)", re.DOTALL)
#: Weighs more than all the frames of any sample.
SLOW: Final = 1 << 60


class Weights(dict[bytes, int]):
    """A line's weight within a sample (``Renamer.weight``); SLOW for everything that has to be
    looked at in its place."""

    def __init__(self, renamer: Renamer) -> None:
        super().__init__()
        self._renamer = renamer

    def __missing__(self, line: bytes) -> int:
        if not line:
            return 0
        weight: int | None = 0
        if not _USER.fullmatch(line):
            frame = text.parse(line, False)
            if isinstance(frame, text.FrameLine):
                weight = self._renamer.weight(frame)
            elif frame is not None or not text.is_source(line):
                return SLOW
        if weight is None:
            return SLOW
        if len(line) <= _KEPT:
            if len(self) >= _MOST:
                self.clear()
            self[line] = weight
        return weight


class Annotator:
    """Text in, text out. ``feed`` takes any piece of it, ``close`` tells its end."""

    def __init__(self, renamer: Renamer) -> None:
        self._renamer = renamer
        self._tally = renamer.tally
        self._weights = Weights(renamer)
        self._cutter = Cutter()
        #: Whether a sample can begin here: at the start, and after a blank line.
        self._is_start = True
        self._has_frames = True

    def feed(self, data: bytes) -> bytes:
        """What can be said now: all lines that have ended."""
        before, whole, after = self._cutter.cut(data)
        if after:
            self._tally.unparsed += 1
        return before + (self._lines(whole) if whole else b"") + after

    def close(self) -> bytes:
        """The rest: a last line without its end."""
        rest = self._cutter.rest()
        return self._line(rest) if rest else b""

    def _lines(self, whole: bytes) -> bytes:
        """Lines that have all ended."""
        pieces = whole[:-1].split(b"\n\n")
        for at, piece in enumerate(pieces):
            if at:
                self._blank()
            passed = self._sample(piece) if self._is_start else None
            if passed is None:
                passed = b"\n".join(map(self._line, piece.split(b"\n")))
            pieces[at] = passed
        pieces[-1] += b"\n"
        return b"\n\n".join(pieces)

    def _sample(self, piece: bytes) -> bytes | None:
        """A header with the frames below it; None if this is anything else."""
        first, *lines = piece.split(b"\n")
        header = text.header(first)
        if header is None or header.payload.endswith(b")"):
            return None
        self._begin_sample(header)
        if not lines:
            return piece
        weights = list(map(self._weights.__getitem__, lines))
        weight = sum(weights)
        if weight >= SLOW:
            return b"\n".join((first, *map(self._weighed, lines, weights)))
        self._renamer.count(weight)
        self._has_frames = bool(lines[0])
        if not lines[-1]:
            self._blank()
        return piece

    def _weighed(self, line: bytes, weight: int) -> bytes:
        """A line that may be known to stay as it is."""
        if weight >= SLOW or not line or self._is_start:
            return self._line(line)
        self._has_frames = True
        self._renamer.count(weight)
        return line

    def _begin_sample(self, header: text.Header | None) -> None:
        self._renamer.begin(header)
        self._has_frames = False
        self._is_start = False

    def _blank(self) -> None:
        """A blank line: the sample's end, if it is not one between its header and its frames."""
        self._is_start = True
        if self._has_frames:
            self._renamer.begin(None)

    def _line(self, line: bytes) -> bytes:
        if not line.strip():
            self._blank()
            return line
        parsed = text.parse(line, self._is_start)
        if isinstance(parsed, text.Header):
            self._begin_sample(parsed)
            frame = text.payload_frame(line, parsed.payload)
            return line if frame is None else self._frame(line, frame)
        return self._other(line) if parsed is None else self._frame(line, parsed)

    def _frame(self, line: bytes, frame: text.FrameLine) -> bytes:
        self._has_frames = True
        self._is_start = False
        return self._renamer.replace(line, frame)

    def _other(self, line: bytes) -> bytes:
        """A comment, a side-band record, a frame's source line, or junk."""
        if not (line.startswith(b"#") or text.is_record(line) or text.is_source(line)):
            self._tally.unparsed += 1
        if self._is_start:  # Whatever follows, the sample before has ended.
            self._renamer.begin(None)
        return line
