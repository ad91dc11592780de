"""The kernel's symbols now and lately, for several threads to ask.

One lock guards all of it. It is held while changes are applied and addresses are resolved, and no
foreign code is called meanwhile. One thread may take it twice: a signal handler that asks can
interrupt an answer.

While ``tracker.lost`` is set, nothing follows the kernel yet, or changes were lost and it has not
been enumerated again. Answers about later than ``tracker.lost.until`` are then from what was known
last: names of BPF are GAP, and a symbol that is missing may have been lost.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Union

from ksym_plugin.kernel import identity
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
    from collections.abc import Iterable

    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.timeline.symbols import Lifetime, Load
    from ksym_plugin.timeline.tracker import Update


class Changed(NamedTuple):
    """Symbols that came and went with one read; the table's generation since."""

    added: list[Symbol]
    removed: list[Symbol]
    generation: int


#: What hosts are notified of.
Notice = Union[Changed, Loss]


class Table:
    """A timeline and static symbols under one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self.tracker = Tracker(time.monotonic_ns, self._note, self.lock)
        self.tracker.timeline.nodes = identity.possible_nodes()
        self.tracker.lose_track(0)
        self._statics: Kallsyms | None = None
        self._resolver = Resolver(self.tracker.timeline)
        self._notices: list[Notice] = []

    def frames(self, addresses: Iterable[int], at: int, late: bool = False) -> list[Frame | Reason]:
        """An answer for each address as of ``at`` (CLOCK_MONOTONIC ns).

        ``late`` says that ``at`` is later than what has been applied.
        """
        with self.lock:
            frames = self._resolver.frames(addresses, at)
            lost = self.tracker.lost
            late = late or (lost is not None and at >= lost.until)
        return [_uncertain(frame) for frame in frames] if late else frames

    def for_all_since(self, frame: Frame, since: int) -> Frame | Reason:
        """A frame of now, GAP where samples since then may have another name."""
        with self.lock:
            timeline, lost = self.tracker.timeline, self.tracker.lost
            names = timeline.names_since(frame.address, since)
            is_lost = lost is not None or timeline.lost_between(since, time.monotonic_ns())
        if frame.kind == KERNEL or not (is_lost or len({*names, frame.name}) > 1):
            return frame
        return _doubted(frame)

    def use_statics(self, kallsyms: Kallsyms | None) -> None:
        with self.lock:
            self._statics = kallsyms
            self._resolver = Resolver(self.tracker.timeline, kallsyms)

    def start_of(self, name: str) -> int | None:
        """The address of the symbol of this name now. Takes time linear in their number."""
        with self.lock:
            statics, live = self._statics, self.tracker.timeline.live()
        if statics is not None:
            # Its BPF lines are those of when it was read.
            for symbol in statics.by_name(name):
                if symbol.module != BPF_MODULE:
                    return symbol.start
        return next((life.symbol.start for life in live if life.symbol.name == name), None)

    def fill(self, loads: list[Load]) -> None:
        """Take in an enumeration while nothing follows the kernel; its names stay GAP."""
        with self.lock:
            lost = self.tracker.lost
            if lost is not None and lost.until == 0:
                self.tracker.apply(loads, max((load.latest for load in loads), default=0))

    @property
    def has_notices(self) -> bool:
        """Whether there is a notice that nobody has taken."""
        return bool(self._notices)

    def take_notices(self) -> list[Notice]:
        """The notices since the last call, in order."""
        with self.lock:
            notices, self._notices = self._notices, []
        return notices

    def _note(self, update: Update) -> None:
        self._notices += update.losses
        ended = [one for one in update.disturbed if one.unloaded_latest is not None]
        if update.added or update.removed or update.disturbed:
            self._announce(update.added, [*update.removed, *ended])
        if update.is_resync:
            if not self.tracker.resyncs:
                # The first time a host has nothing to drop but GAP answers.
                self._notices.clear()
            self._announce([], [])

    def _announce(self, added: list[Lifetime], removed: list[Lifetime]) -> None:
        self.generation += 1
        symbols = [one.symbol for one in added], [one.symbol for one in removed]
        self._notices.append(Changed(*symbols, self.generation))


def _uncertain(frame: Frame | Reason) -> Frame | Reason:
    """An answer of a time that the table has not been brought up to."""
    if isinstance(frame, Frame):
        return frame if frame.kind in (KERNEL, MODULE) else _doubted(frame)
    return LOST if frame in (NOT_LOADED, VACANT, UNKNOWN_ADDRESS, AMONG_BPF) else frame


def _doubted(frame: Frame) -> Frame:
    return Frame(frame.address, frame.name, frame.offset, frame.module, frame.kind, GAP)
