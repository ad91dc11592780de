"""Records a source into a history: when to read it, when to commit, when to read the clocks.

The tracker finds losses and makes up for them. The writer keeps what happened, and when.
"""

from __future__ import annotations

import contextlib
import select
import time

from ksym_plugin.history.schema import HEARTBEAT
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.reconcile import heal
from ksym_plugin.timeline.tracker import CLOCK_SPAN, Tracker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ksym_plugin.history.writer import HistoryWriter
    from ksym_plugin.kernel.clocks import PerfClock
    from ksym_plugin.timeline.program import ProgramDetails
    from ksym_plugin.timeline.tracker import DetailsSource, ModuleSource, Source, Update

#: The longest a change waits for its commit, in ns.
_BATCH_SPAN = 200_000_000
#: A change is stamped before it is put into the buffer, so one that another CPU is about to
#: put there is older than the read that misses it. That takes microseconds, but a virtual CPU
#: may be stopped meanwhile. What is older than this, in ns, has arrived.
_IN_FLIGHT = 1_000_000


class Recorder:
    """Follows ``source`` into ``writer``; both stay the caller's to close.

    ``details`` has the details of programs and their source lines, ``modules`` the changes
    of the kernel's modules; the history gets both. ``timeline`` has what is live and what
    ended lately. One thread runs it. ``now`` is CLOCK_MONOTONIC ns, ``sleep`` takes seconds.
    """

    def __init__(
        self,
        source: Source,
        writer: HistoryWriter,
        clock: PerfClock,
        details: DetailsSource | None = None,
        modules: ModuleSource | None = None,
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        #: All that happened before this is in the history, in CLOCK_MONOTONIC ns.
        self.covered = 0
        self.tracker = Tracker(now, self._note, contextlib.nullcontext())
        self.timeline = self.tracker.timeline
        self._source = source
        self._writer = writer
        self._clock = clock
        self._details = details
        self._modules = modules
        self._now = now
        self._sleep = sleep
        self._committed = self._ticked = 0

    def start(self) -> None:
        """Take in what the kernel holds; from here on the history covers the time."""
        for lifetime in self._writer.earlier:
            self.timeline.enter(lifetime)
        self.tracker.resync(self._source, self._writer.covered_before)
        self._cover()
        # What went away before the enumeration reached it was never seen.
        now = self._now()
        self._writer.cover_from(now)
        self._writer.cover_modules(self._modules is not None)
        self._tick(now)
        self._commit()

    def run(self, until: int | None, stop_fd: int) -> None:
        """Record until CLOCK_MONOTONIC ns ``until``, or until ``stop_fd`` is readable."""
        while True:
            now = self._now()
            if until is not None and now >= until:
                return
            # Details and modules may have no descriptor any more.
            sides = (self._source, self._details, self._modules)
            poller = select.poll()
            for fd in (stop_fd, *(side.fileno() for side in sides if side is not None)):
                if fd >= 0:
                    poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(self.wait_ms(now, until))}
            self.step()
            if self._modules is not None and self._modules.fileno() in ready:
                self._follow_modules()
            if stop_fd in ready:
                return

    def step(self) -> None:
        """Apply what has arrived, and commit when it is time."""
        before = self._now()
        # Details first: the source has announced all programs that they are about.
        details = [] if self._details is None else self._details.read()
        self.tracker.read(self._source)
        self._learn(details)
        self._cover()
        if self.tracker.is_resync_due(before):
            self.tracker.resync(self._source)
            self._cover()
        if before - self._ticked >= CLOCK_SPAN:
            self._tick(before)
        if before >= self._commit_due():
            self._commit()
            self._committed = before
            self.tracker.forget(before)

    def finish(self) -> None:
        """Apply what is still waiting, make good what was lost, and end the session."""
        self.tracker.read(self._source)
        if self.tracker.lost is not None:
            self.tracker.resync(self._source)
        before = self._now()
        details = [] if self._details is None else self._details.finish()
        # This is the last read: wait for what is in flight.
        self._sleep(_IN_FLIGHT / 1e9)
        self.tracker.read(self._source)
        self._learn(details)
        self._follow_modules(is_over=True)
        self.tracker.end_gap(before)
        self.covered = before
        self._tick(before)
        self._writer.close(self.covered)

    def wait_ms(self, now: int, until: int | None) -> int:
        """How long to wait for the source at most."""
        due = [self._commit_due()]
        if self._source.interval is not None:
            due.append(now + int(self._source.interval * 1e9))
        if self.tracker.lost is not None:
            due.append(self.tracker.resync_after)
        if until is not None:
            due.append(until)
        return max(0, -(-(min(due) - now) // 1_000_000))

    def _commit_due(self) -> int:
        return self._committed + (_BATCH_SPAN if self._writer.pending else HEARTBEAT)

    def _cover(self) -> None:
        """Move ``covered`` up to what has been read; after a loss only a resync does."""
        if self.tracker.lost is None:
            self.covered = self.tracker.covered - _IN_FLIGHT

    def _commit(self) -> None:
        """Write what happened so far. Modules are asked too: not all changes wake the poll."""
        self._follow_modules()
        unsettled = None if self._modules is None else self._modules.unsettled
        self._writer.commit(self.covered if unsettled is None else min(self.covered, unsettled))

    def _follow_modules(self, is_over: bool = False) -> None:
        """Apply the changes of modules, which do not count as BPF's."""
        modules = self._modules
        if modules is None:
            return
        try:
            changes = modules.finish() if is_over else modules.read()
        except (SourceError, OSError) as error:
            # BPF's names do not depend on modules.
            modules.notes.append(f"modules are not followed any more ({error})")
            self._writer.cover_modules(False)
            self._modules = None
            modules.close()
            return
        before = self.tracker.changes
        self.tracker.apply(changes)
        self.tracker.changes = before

    def _note(self, update: Update) -> None:
        for loss in update.losses:
            self._writer.lost(loss)
        for lifetime in update.touched:
            self._writer.note(lifetime)

    def _learn(self, details: list[ProgramDetails]) -> None:
        for program in details:
            self._writer.note_program(program)
            for lifetime in heal(self.timeline, program):
                self._writer.note(lifetime)

    def _tick(self, now: int) -> None:
        self._writer.tick(self._clock.read())
        self._ticked = now
