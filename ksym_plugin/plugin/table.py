"""What is known of the kernel's symbols now and lately, for several threads to ask.

One lock guards all of it; whoever applies changes and whoever asks holds it for as long
as that takes, and nobody calls anything of another's meanwhile. It may be taken twice by
one thread: a signal handler that asks can interrupt an answer.

From ``doubted`` on answers are only as good as what was last known: nobody watches yet,
or changes were lost and the kernel has not been asked anew. Names of BPF are GAP then, and
what is not there may have been lost.
"""

from __future__ import annotations

import threading
from collections import deque

from ksym_plugin.kernel.clocks import MONOTONIC, ClockMap
from ksym_plugin.timeline.reconcile import differences
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
    Load,
    Loss,
    Reason,
    Unload,
)
from ksym_plugin.timeline.timeline import MEMORY_COUNT, MEMORY_SPAN, Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Final, Union

    from ksym_plugin.kernel.clocks import Instant
    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.timeline.symbols import Symbol

    Change = Union[Load, Unload, Loss]
    News = Union["Changed", Loss]

NEVER: Final = 1 << 63
#: So many readings of all clocks are kept: an hour's, at one each ten seconds.
_INSTANTS: Final = 360


class Changed:
    """Symbols that came and went with one read; the table's generation since."""

    __slots__ = ("added", "generation", "removed")

    def __init__(self, added: list[Symbol], removed: list[Symbol], generation: int) -> None:
        self.added = added
        self.removed = removed
        self.generation = generation


class Table:
    """A timeline, static symbols and clocks under one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        #: All that happened before this is applied, in CLOCK_MONOTONIC ns.
        self.covered = 0
        self.doubted = 0
        self._timeline = Timeline()
        self._kept = 0
        self._statics: Kallsyms | None = None
        self._resolver = Resolver(self._timeline)
        self._instants: deque[Instant] = deque(maxlen=_INSTANTS)
        self._clocks = ClockMap(())
        self._news: list[News] = []

    def frames(self, addresses: Iterable[int], at: int, late: bool = False) -> list[Frame | Reason]:
        """An answer for each address as of ``at`` (CLOCK_MONOTONIC ns).

        ``late`` says that ``at`` is later than what the caller could have applied.
        """
        with self.lock:
            frames = self._resolver.frames(addresses, at)
            late = late or at >= self.doubted
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
            self._resolver = Resolver(self._timeline, kallsyms)

    def start_of(self, name: str) -> int | None:
        """Where the symbol of this name is now. Reads through all of them."""
        with self.lock:
            statics, live = self._statics, self._timeline.live()
        if statics is not None:
            # Its BPF lines are of when it was read.
            for symbol in statics.by_name(name):
                if symbol.module != BPF_MODULE:
                    return symbol.start
        return next((life.symbol.start for life in live if life.symbol.name == name), None)

    def apply(self, changes: Sequence[Change], covered: int) -> None:
        """Take in what a source has read; all that happened before ``covered`` is in it."""
        with self.lock:
            added: list[Symbol] = []
            removed: list[Symbol] = []
            for change in changes:
                if isinstance(change, Loss):
                    self._lose(change)
                else:
                    self._take(change, added, removed)
            disturbed = self._timeline.take_disturbed()
            removed += [life.symbol for life in disturbed if life.unloaded_latest is not None]
            if added or removed or disturbed:
                self.generation += 1
                self._news.append(Changed(added, removed, self.generation))
            self.covered = max(self.covered, covered)

    def fill(self, loads: list[Load]) -> None:
        """What is there, for as long as nobody watches; all of it stays in doubt."""
        with self.lock:
            if self.doubted == 0:
                self.apply(loads, max((load.latest for load in loads), default=0))

    def settle(self, snapshot: list[Load], lists_images: bool, began: int, ended: int) -> None:
        """Become equal to the kernel, as of a snapshot taken from ``began`` to ``ended``."""
        with self.lock:
            since, self.doubted = self.doubted, NEVER
            gap = Loss(since, ended, "until the resync")
            self._timeline.apply(gap)
            if since:
                self._news.append(gap)
            live = {life.symbol.start: life for life in self._timeline.open()}
            self.apply(differences(live, snapshot, lists_images, (since, began, ended)), began)
            if not since:
                # The first time there is nothing to drop but what was in doubt.
                self._news.clear()
            self.generation += 1
            self._news.append(Changed([], [], self.generation))

    def doubt(self, since: int) -> None:
        """From ``since`` on nobody watches."""
        with self.lock:
            self.doubted = min(self.doubted, since)

    @property
    def has_news(self) -> bool:
        """Whether there is something that was not told yet."""
        return bool(self._news)

    def take_news(self) -> list[News]:
        """What was not told yet, in order."""
        with self.lock:
            news, self._news = self._news, []
        return news

    def forget(self, now: int) -> None:
        """Keep memory bounded: what ended long ago goes, and that time is a gap."""
        with self.lock:
            if self._timeline.count - self._kept > MEMORY_COUNT:
                self._timeline.expire(now - MEMORY_SPAN)
                self._timeline.apply(Loss(0, now - MEMORY_SPAN, "forgotten"))
                self._kept = self._timeline.count

    def _take(self, change: Load | Unload, added: list[Symbol], removed: list[Symbol]) -> None:
        if not isinstance(change, (Load, Unload)):
            raise TypeError(f"{change!r} is no change")
        before = self._timeline.count
        lifetime = self._timeline.apply(change)
        if lifetime is None:
            return
        if self._timeline.count > before:
            added.append(lifetime.symbol)
        elif isinstance(change, Unload):
            removed.append(lifetime.symbol)

    def _lose(self, loss: Loss) -> None:
        self._timeline.apply(loss)
        self._news.append(loss)
        self.doubted = min(self.doubted, loss.until)


def _doubt(frame: Frame | Reason) -> Frame | Reason:
    if isinstance(frame, Frame):
        if frame.kind in (KERNEL, MODULE):
            return frame
        return Frame(frame.address, frame.name, frame.offset, frame.module, frame.kind, GAP)
    return LOST if frame in (NOT_LOADED, VACANT, UNKNOWN_ADDRESS, AMONG_BPF) else frame
