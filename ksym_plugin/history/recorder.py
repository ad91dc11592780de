"""Drives a source into a timeline and a history; makes good what was lost.

Order of the start: the source is subscribed already, then the kernel's symbols are
enumerated, then what changed meanwhile is applied. A resync after a loss goes the same
way. It is not repeated before ten times its own length has passed, so that a source
which keeps losing costs a bounded share of one CPU.
"""

from __future__ import annotations

import select
import time

from ksym_plugin.history.schema import HEARTBEAT
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.reconcile import REST, differences, heal
from ksym_plugin.timeline.symbols import Load, Loss, Unload
from ksym_plugin.timeline.timeline import MEMORY_COUNT, MEMORY_SPAN, Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.history.writer import HistoryWriter
    from ksym_plugin.timeline.program import ProgramDetails
    from ksym_plugin.timeline.source import DetailsSource, ModuleSource, Source

#: The longest a change waits for its commit, in ns.
_BATCH_SPAN: Final = 200_000_000
#: A change is stamped before it is handed over: one that another CPU is just telling of has
#: an earlier stamp than the drain it is not in. That takes microseconds, and a virtual CPU
#: may be kept from going on; what is older than this, in ns, has come.
_IN_FLIGHT: Final = 1_000_000
#: How often all clocks are read, in ns: perf's drifts some 10 ns a second.
_CLOCK_SPAN: Final = 10_000_000_000


class Recorder:
    """Follows ``source`` into ``writer``; both stay the caller's to close.

    ``details`` tells what the programs are and of their source lines, whenever it can, and
    ``modules`` of the kernel's modules, which the history keeps as well.
    ``timeline`` holds what is live and what ended lately. One thread runs it.
    """

    def __init__(
        self,
        source: Source,
        writer: HistoryWriter,
        clock: PerfClock,
        details: DetailsSource | None = None,
        modules: ModuleSource | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.changes = 0
        self.losses = 0
        self.resyncs = 0
        #: All that happened before this is applied, in CLOCK_MONOTONIC ns.
        self.covered = 0
        self._source = source
        self._writer = writer
        self._clock = clock
        self._details = details
        self._modules = modules
        self._lost: Loss | None = None
        self._resync_after = 0
        self._committed = self._ticked = self._kept = 0

    def start(self) -> None:
        """Take in what the kernel holds; from here on the history covers the time."""
        for lifetime in self._writer.earlier:
            self.timeline.enter(lifetime)
        since = self._writer.covered_before
        self._resync(since)
        # What went before the enumeration reached it was never seen.
        now = time.monotonic_ns()
        self._writer.cover_from(now)
        self._writer.cover_modules(self._modules is not None)
        self._tick(now)
        self._commit()

    def run(self, until: int | None, stop_fd: int) -> None:
        """Record until CLOCK_MONOTONIC ns ``until``, or until ``stop_fd`` is readable."""
        poller = select.poll()
        poller.register(stop_fd, select.POLLIN)
        if self._source.fileno() >= 0:
            poller.register(self._source.fileno(), select.POLLIN)
        watched: set[int] = set()
        while True:
            watched = self._watch(poller, watched)
            now = time.monotonic_ns()
            if until is not None and now >= until:
                return
            ready = poller.poll(self._patience(now, until))
            self.step()
            if any(self._is_of_modules(fd) for fd, _ in ready):
                self._follow_modules()
            if any(fd == stop_fd for fd, _ in ready):
                return

    def step(self) -> None:
        """Apply what has arrived, and commit when it is time."""
        before = time.monotonic_ns()
        # What is told of programs now, the source has announced before.
        details = [] if self._details is None else self._details.read()
        self._apply(self._source.read())
        self._learn(details)
        self._cover(before)
        if self._lost is not None and before >= self._resync_after:
            self._resync(self._lost.since)
        if before - self._ticked >= _CLOCK_SPAN:
            self._tick(before)
        due = _BATCH_SPAN if self._writer.pending else HEARTBEAT
        if before - self._committed >= due:
            self._commit()
            self._committed = before
            self._forget(before)

    def finish(self) -> None:
        """Apply what is still waiting, make good what was lost, and end the session."""
        self._apply(self._source.read())
        if self._lost is not None:
            self._resync(self._lost.since)
        before = time.monotonic_ns()
        details = [] if self._details is None else self._details.finish()
        # Nothing is read later: what is in flight now has come when this is over.
        time.sleep(_IN_FLIGHT / 1e9)
        self._apply(self._source.read())
        self._learn(details)
        self._follow_modules(is_over=True)
        self._end_gap(before)
        self._cover(before + _IN_FLIGHT)
        self._tick(before)
        self._writer.close(self.covered)

    def _patience(self, now: int, until: int | None) -> int:
        """How long to wait for the source at most, in ms."""
        due = self._committed + (_BATCH_SPAN if self._writer.pending else HEARTBEAT)
        if self._source.interval is not None:
            due = min(due, now + int(self._source.interval * 1e9))
        if self._lost is not None:
            due = min(due, self._resync_after)
        if until is not None:
            due = min(due, until)
        return max(0, -(-(due - now) // 1_000_000))

    def _commit(self) -> None:
        """Write what happened so far, modules included: not all that they do comes as an event."""
        self._follow_modules()
        unsettled = None if self._modules is None else self._modules.unsettled
        self._writer.commit(self.covered if unsettled is None else min(self.covered, unsettled))

    def _is_of_modules(self, fd: int) -> bool:
        return self._modules is not None and self._modules.fileno() == fd

    def _follow_modules(self, is_over: bool = False) -> None:
        """Apply what modules did, which is not counted among BPF's changes."""
        modules = self._modules
        if modules is None:
            return
        try:
            changes = modules.finish() if is_over else modules.read()
        except (SourceError, OSError) as error:
            # BPF's names do not depend on it.
            modules.notes.append(f"modules are not followed any more ({error})")
            self._writer.cover_modules(False)
            self._modules = None
            modules.close()
            return
        before = self.changes
        self._apply(changes)
        self.changes = before

    def _apply(self, changes: list[Load | Unload | Loss]) -> None:
        for change in changes:
            if isinstance(change, Loss):
                self._lose(change)
                continue
            lifetime = self.timeline.apply(change)
            if lifetime is not None:
                self._writer.note(lifetime)
            self.changes += 1
        for lifetime in self.timeline.take_disturbed():
            self._writer.note(lifetime)

    def _watch(self, poller: select.poll, watched: set[int]) -> set[int]:
        """Have ``poller`` look at details and modules as long as there can be any."""
        sides = (self._details, self._modules)
        wanted = {side.fileno() for side in sides if side is not None}
        if wanted != watched:
            for fd in watched - wanted:
                if fd >= 0:
                    poller.unregister(fd)
            for fd in wanted - watched:
                if fd >= 0:
                    poller.register(fd, select.POLLIN)
        return wanted

    def _learn(self, details: list[ProgramDetails]) -> None:
        for program in details:
            self._writer.note_program(program)
            for lifetime in heal(self.timeline, program):
                self._writer.note(lifetime)

    def _lose(self, loss: Loss) -> None:
        self.losses += 1
        self.timeline.apply(loss)
        self._writer.lost(loss)
        if self._lost is None:
            self._lost = loss
        else:
            first = self._lost
            since, until = min(first.since, loss.since), min(first.until, loss.until)
            self._lost = Loss(since, until, first.cause, first.count)

    def _cover(self, until: int) -> None:
        """All that could be read at ``until`` is applied.

        But after a loss, nothing is sure until a resync.
        """
        if self._lost is None:
            self.covered = until - _IN_FLIGHT
        elif until > self._lost.until:
            self.timeline.apply(Loss(self._lost.until, until, "until the resync"))

    def _end_gap(self, until: int) -> None:
        """Keep that what began with a loss ended here: by a resync, or with the session."""
        if self._lost is not None and until > self._lost.until:
            rest = Loss(self._lost.until, until, "until the resync")
            self.timeline.apply(rest)
            self._writer.lost(rest)
        self._lost = None

    def _resync(self, since: int) -> None:
        """Make the table equal to the kernel's; what differs changed after ``since``."""
        began = time.monotonic_ns()
        try:
            snapshot = self._source.snapshot()
        except SourceError:
            if not self.resyncs:
                raise
            # Nothing can be made good for now; the gap stays open until it can.
            self._resync_after = time.monotonic_ns() + HEARTBEAT
            return
        ended = time.monotonic_ns()
        self._end_gap(ended)
        # What others were loaded over comes to light when they end.
        live = {lifetime.symbol.start: lifetime for lifetime in self.timeline.open()}
        images = self._source.lists_images
        self._apply(differences(live, snapshot, images, (since, began, ended)))
        before = time.monotonic_ns()
        self._apply(self._source.read())
        self._cover(before)
        self.resyncs += 1
        self._resync_after = ended + REST * (ended - began)

    def _tick(self, now: int) -> None:
        self._writer.tick(self._clock.read())
        self._ticked = now

    def _forget(self, now: int) -> None:
        """Keep memory bounded: what ended long ago is in the history."""
        if self.timeline.count - self._kept > MEMORY_COUNT:
            self.timeline.expire(now - MEMORY_SPAN)
            self._kept = self.timeline.count
