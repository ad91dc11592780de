"""perf's samples from ``perf script`` text: thread, time and kernel stack.

The text is printed with ``--ns --header`` and recorded with ``-k CLOCK_MONOTONIC``. Its
header also tells how far UTC, py-spy's clock, is from that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.perf import text
from ksym_plugin.perf.fold import FoldOptions, format_frame, format_task
from ksym_plugin.perf.repaint import rewritten
from ksym_plugin.perf.text import Cutter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ksym_plugin.perf.repaint import Renamer

#: In what perf script prints for ``--header``.
_CLOCKID = re.compile(rb"# event : .*use_clockid = 1.*clockid = (-?\d+)")
_REFERENCE = re.compile(
    rb"# reference time: .* = (\d+)\.(\d+) \(TOD\) = (\d+)\.(\d+) \(monotonic\)"
)
_MONOTONIC = b"1"
_SECOND = 1_000_000_000
_OPTIONS = FoldOptions(kernel=True, bpf=True)
#: Where a thread is while py-spy has it stopped (kernel/signal.c).
_STOPPED = re.compile(rb"ptrace_stop|ptrace_do_notify|ptrace_notify|do_jobctl_trap")
#: How many formatted lines are kept.
_MOST_FORMATTED = 1 << 17
_LONGEST_ID = 10


class Hit(NamedTuple):
    """A sample of perf: its thread, time (CLOCK_MONOTONIC ns) and kernel frames, root first.

    ``is_stopped`` if py-spy had the thread stopped: then the frames are of that stop.
    """

    comm: str
    pid: int
    tid: int
    time: int
    kernel: tuple[str, ...]
    is_stopped: bool


class Reader:
    """Reads text into hits; ``is_monotonic`` and ``shift`` are set once its header is read.

    Only samples of the first event are taken. ``passed_over`` were of others, or have no
    thread or no time.
    """

    def __init__(self, renamer: Renamer | None = None) -> None:
        self.is_monotonic: bool | None = None
        #: What to add to ns of UTC for CLOCK_MONOTONIC.
        self.shift: int | None = None
        self.passed_over = 0
        self._event: bytes | None = None
        self._renamer = renamer
        self._formatted: dict[bytes, tuple[str, bool]] = {}
        self._stacks: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._header: text.Header | None = None
        self._time = 0
        self._frames: list[str] = []
        self._is_stopped = False

    def read(self, pieces: Iterable[bytes]) -> Iterator[Hit]:
        cutter = Cutter()
        for piece in pieces:
            _, whole, _ = cutter.cut(piece)
            for line in whole[:-1].split(b"\n") if whole else ():
                yield from self._line(line)
        for line in (cutter.rest(), b""):
            yield from self._line(line)

    def _line(self, line: bytes) -> Iterator[Hit]:
        if line.startswith(b"\t"):
            self._frame(line)
            return
        if self._event is None and line.startswith(b"#"):
            self._comment(line)
            return
        if self._header is not None:
            yield self._finish(self._header)
            self._header = None
        if line.strip():
            self._begin(line)

    def _comment(self, line: bytes) -> None:
        clock = _CLOCKID.match(line)
        if line.startswith(b"# event : "):
            is_monotonic = clock is not None and clock[1] == _MONOTONIC
            self.is_monotonic = is_monotonic and self.is_monotonic is not False
        reference = _REFERENCE.match(line)
        if reference is not None:
            utc, monotonic = (
                int(reference[at]) * _SECOND + int(reference[at + 1].ljust(9, b"0")[:9])
                for at in (1, 3)
            )
            self.shift = monotonic - utc

    def _begin(self, line: bytes) -> None:
        header = text.header(line)
        if header is None:
            return
        self._event = self._event or header.event
        window = header.window()
        has_thread = header.pid and len(header.tid) <= _LONGEST_ID
        if header.event != self._event or not has_thread or window is None:
            self.passed_over += 1
            return
        self._header = header
        self._time = window[0]
        self._frames = []
        self._is_stopped = False
        if self._renamer is not None:
            self._renamer.begin(header)

    def _frame(self, line: bytes) -> None:
        if self._header is None:
            return
        formatted = self._formatted.get(line)
        if formatted is None:
            formatted = self._format(line)
        frame, is_stop = formatted
        if frame:
            self._frames.append(frame)
        self._is_stopped = self._is_stopped or is_stop

    def _format(self, line: bytes) -> tuple[str, bool]:
        """The kernel frame of a line, empty if it has none; and whether it is in a stop."""
        frame = text.frame(line)
        is_kernel = frame is not None and len(frame.digits) == 16 and frame.address >> 63
        is_settled = True
        if frame is not None and is_kernel and self._renamer is not None:
            is_settled = self._renamer.weight(frame) is not None
            frame = text.frame(rewritten(line, frame, *self._renamer.decide(frame)))
        if frame is None or not is_kernel:
            formatted = ("", False)
        else:
            name = format_frame(frame, _OPTIONS, False).decode("utf-8", "surrogateescape")
            formatted = (name, _STOPPED.fullmatch(frame.name) is not None)
        if is_settled and len(self._formatted) < _MOST_FORMATTED:
            self._formatted[line] = formatted
        return formatted

    def _finish(self, header: text.Header) -> Hit:
        comm = format_task(header.comm).decode("utf-8", "surrogateescape")
        pid, tid = int(header.pid[:_LONGEST_ID]), int(header.tid)
        stack = tuple(reversed(self._frames))
        stack = self._stacks.setdefault(stack, stack)
        return Hit(comm, pid, tid, self._time, stack, self._is_stopped)
