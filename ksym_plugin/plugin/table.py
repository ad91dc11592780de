"""What is known of the kernel's symbols now and lately, for several threads to ask.

One lock guards all of it; whoever applies changes and whoever asks holds it for as long
as that takes, and nobody calls anything of another's meanwhile. It may be taken twice by
one thread: a signal handler that asks can interrupt an answer.

While ``tracker.lost`` is set, answers about later than its ``until`` are only as good as
what was last known: nobody follows the kernel yet, or changes were lost and it has not been
enumerated again. Names of BPF are GAP then, and what is not there may have been lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Union

from ksym_plugin.kernel.clocks import MONOTONIC, ClockMap
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import (
    AMONG_BPF,
    BPF_MODULE,
    GAP,
    KERNEL,
    LOST,
    MODULE,
    NOT_LOADED,
    UNKNOWN_ADDRESS,
    VACANT,
    Frame,
    Loss,
    Reason,
    Symbol,
)
from ksym_plugin.timeline.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ksym_plugin.kernel.clocks import Instant
    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.timeline.symbols import Load
    from ksym_plugin.timeline.tracker import Update

#: So many readings of all clocks are kept: an hour's, at one each ten seconds.
_INSTANTS = 360


class Changed(NamedTuple):
    """Symbols that came and went with one read; the table's generation since."""

    added: list[Symbol]
    removed: list[Symbol]
    generation: int


News = Union[Changed, Loss]


class Table:
    """A timeline, static symbols and clocks under one lock."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self.tracker = Tracker(now, self._note, self.lock)
        self.tracker.lose_track(0)
        self._statics: Kallsyms | None = None
        self._resolver = Resolver(self.tracker.timeline)
        self._instants: deque[Instant] = deque(maxlen=_INSTANTS)
        self._clocks = ClockMap(())
        self._news: list[News] = []

    def frames(self, addresses: Iterable[int], at: int, late: bool = False) -> list[Frame | Reason]:
        """An answer for each address as of ``at`` (CLOCK_MONOTONIC ns).

        ``late`` says that ``at`` is later than what the caller could have applied.
        """
        with self.lock:
            frames = self._resolver.frames(addresses, at)
            lost = self.tracker.lost
            late = late or (lost is not None and at >= lost.until)
        return [_doubt(frame) for frame in frames] if late else frames

    def to_monotonic(self, clock: str, time_ns: int) -> int:
        """See ``ClockMap.to_monotonic``."""
        return time_ns if clock == MONOTONIC else self._clocks.to_monotonic(clock, time_ns)

    def tick(self, instant: Instant) -> None:
        """Take in a reading of all clocks."""
        self._instants.append(instant)
        # A new one each time, so that nobody needs the lock to read it.
        self._clocks = ClockMap(self._instants)

    def use_statics(self, kallsyms: Kallsyms | None) -> None:
        with self.lock:
            self._statics = kallsyms
            self._resolver = Resolver(self.tracker.timeline, kallsyms)

    def start_of(self, name: str) -> int | None:
        """Where the symbol of this name is now. Reads through all of them."""
        with self.lock:
            statics, live = self._statics, self.tracker.timeline.live()
        if statics is not None:
            # Its BPF lines are of when it was read.
            for symbol in statics.by_name(name):
                if symbol.module != BPF_MODULE:
                    return symbol.start
        return next((life.symbol.start for life in live if life.symbol.name == name), None)

    def fill(self, loads: list[Load]) -> None:
        """What is there, for as long as nobody follows the kernel; all of it stays in doubt."""
        with self.lock:
            lost = self.tracker.lost
            if lost is not None and lost.until == 0:
                self.tracker.apply(loads, max((load.latest for load in loads), default=0))

    @property
    def has_news(self) -> bool:
        """Whether there is something that was not told yet."""
        return bool(self._news)

    def take_news(self) -> list[News]:
        """What was not told yet, in order."""
        with self.lock:
            news, self._news = self._news, []
        return news

    def _note(self, update: Update) -> None:
        self._news += update.losses
        added, removed, disturbed = update.added, update.removed, update.disturbed
        if disturbed:
            removed = [*removed, *(one for one in disturbed if one.unloaded_latest is not None)]
        if added or removed or disturbed:
            self._announce([one.symbol for one in added], [one.symbol for one in removed])
        if update.is_resync:
            if not self.tracker.resyncs:
                # The first time there is nothing to drop but what was in doubt.
                self._news.clear()
            self._announce([], [])

    def _announce(self, added: list[Symbol], removed: list[Symbol]) -> None:
        self.generation += 1
        self._news.append(Changed(added, removed, self.generation))


def _doubt(frame: Frame | Reason) -> Frame | Reason:
    if isinstance(frame, Frame):
        if frame.kind in (KERNEL, MODULE):
            return frame
        return Frame(frame.address, frame.name, frame.offset, frame.module, frame.kind, GAP)
    return LOST if frame in (NOT_LOADED, VACANT, UNKNOWN_ADDRESS, AMONG_BPF) else frame
