"""perf's samples from ``perf script`` text: thread, time and kernel stack.

The text is printed with ``--ns --header`` and recorded with ``-k CLOCK_MONOTONIC``. Its
header also tells how far UTC, py-spy's clock, is from that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.perf.fold import FoldOptions, format_frame, format_task
from ksym_plugin.perf.repaint import Renamer, StackReader, renamed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ksym_plugin.perf.namer import Decision
    from ksym_plugin.perf.text import FrameLine, Header

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


class Reader(StackReader):
    """Reads text into hits; ``is_monotonic`` and ``shift`` are set once its header is read.

    Only samples of the first event are taken. ``passed_over`` were of others, or have no
    thread or no time.
    """

    def __init__(self, renamer: Renamer | None = None) -> None:
        super().__init__(renamer or Renamer())
        self.is_monotonic: bool | None = None
        #: What to add to ns of UTC for CLOCK_MONOTONIC.
        self.shift: int | None = None
        self.passed_over = 0
        self._event: bytes | None = None
        self._hits: list[Hit] = []

    def hits(self, pieces: Iterable[bytes]) -> Iterator[Hit]:
        """The samples of a text that comes in pieces."""
        for piece in pieces:
            self.read(piece)
            yield from self._hits
            self._hits.clear()
        self.end()
        yield from self._hits

    def _outside(self, line: bytes) -> None:
        if self._event is not None:
            return
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

    def _user(self, _line: bytes, _frame: FrameLine) -> None:
        return None

    def _kernel(
        self, _line: bytes, frame: FrameLine, decision: Decision, dso: str, _is_leaf: bool
    ) -> tuple[str, bool] | None:
        """A kernel frame, and whether it is in a stop."""
        frame = renamed(frame, decision, dso)
        name = format_frame(frame, _OPTIONS)
        if name is None:
            return None
        return name.decode("utf-8", "surrogateescape"), _STOPPED.fullmatch(frame.name) is not None

    def _join(self, pieces: list[tuple[str, bool] | None]) -> tuple[tuple[str, ...], bool]:
        kernel = [piece for piece in reversed(pieces) if piece is not None]
        return tuple(name for name, _ in kernel), any(is_stop for _, is_stop in kernel)

    def _sample(self, header: Header, stack: tuple[tuple[str, ...], bool], line: bytes) -> None:
        self._event = self._event or header.event
        window = header.window(line)
        has_thread = header.pid and len(header.tid) <= _LONGEST_ID
        if header.event != self._event or not has_thread or window is None:
            self.passed_over += 1
            return
        comm = format_task(header.comm).decode("utf-8", "surrogateescape")
        pid, tid = int(header.pid[:_LONGEST_ID]), int(header.tid)
        self._hits.append(Hit(comm, pid, tid, window[0], *stack))
