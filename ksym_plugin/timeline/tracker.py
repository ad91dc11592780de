"""What a source of changes is, and a tracker that keeps a timeline equal to the kernel's table.

At the start, and after a loss, the kernel's symbols are enumerated, then what changed
meanwhile is applied: a resync. The time from a loss to the end of the resync is a gap. A
resync is not repeated before ten times its own length has passed, so that a source which keeps
losing costs a bounded share of one CPU.

Nothing here makes system calls: clock, lock and source are the caller's.
"""

from __future__ import annotations

from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.reconcile import differences
from ksym_plugin.timeline.symbols import Load, Loss, Unload
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Protocol, Union

    from ksym_plugin.timeline.program import ProgramDetails
    from ksym_plugin.timeline.symbols import Lifetime

    Change = Union[Load, Unload, Loss]

    class Readable(Protocol):
        """The part of a Source that a Tracker needs."""

        lists_images: bool

        def read(self) -> list[Change]: ...
        def snapshot(self) -> list[Load]: ...

    class DetailsSource(Protocol):
        """Where the details of programs come from; ``fileno`` is as a Source's."""

        def fileno(self) -> int: ...
        def read(self) -> list[ProgramDetails]:
            """What has come since the last call; never waits."""

        def finish(self) -> list[ProgramDetails]:
            """What is still to come; the last call."""

    class ModuleSource(Protocol):
        """Where changes of the kernel's modules come from; ``fileno`` is as a Source's."""

        notes: list[str]

        @property
        def unsettled(self) -> int | None:
            """From when on changes are not known yet, in CLOCK_MONOTONIC ns; None if all are."""

        def fileno(self) -> int: ...
        def read(self) -> list[Change]:
            """All changes since the last call; SourceError or OSError if there are no more."""

        def finish(self) -> list[Change]:
            """The rest of them; the last call."""

        def close(self) -> None: ...


#: For how many times its own length a resync is not repeated.
_REST = 10
#: When a resync that failed is tried again, in ns.
_RETRY_SPAN = 1_000_000_000
#: How often all clocks are read, in ns: perf's drifts some 10 ns a second.
CLOCK_SPAN = 10_000_000_000
#: What ended so long ago, in ns, is dropped each time so many lifetimes have come.
MEMORY_SPAN = 60_000_000_000
MEMORY_COUNT = 50_000


class Source:
    """Where changes of BPF symbols come from.

    Constructing a source starts it: from when the constructor returns, whatever changes
    is in a later ``read``. So a user constructs, takes a ``snapshot``, and then reads.
    A constructor that raises SourceError has closed all it had opened.
    """

    #: The name that ``open_source`` takes.
    name: str = ""
    #: Seconds between reads for a source that cannot say when there is something; None
    #: for one with a ``fileno``.
    interval: float | None = None

    def __init__(self) -> None:
        #: What this source lacks on this kernel, in plain sentences.
        self.notes: list[str] = []
        #: Whether the last snapshot had all symbols but programs: what it lacks is gone.
        self.lists_images = False

    def fileno(self) -> int:
        """A descriptor that becomes readable when ``read`` should be called; or -1."""
        return -1

    def read(self) -> list[Change]:
        """All changes since the last call; never waits for one."""
        raise NotImplementedError

    def snapshot(self) -> list[Load]:
        """The kernel's symbols now. SourceError if they cannot be read."""
        raise NotImplementedError

    def measure(self) -> None:
        """Have the kernel count what the source costs it from now on, where it can.

        SourceError where it does not let this user.
        """

    def stats(self) -> dict[str, int]:
        """What the source has counted, by name; nothing where it does not count."""
        return {}

    def close(self) -> None:
        """Stop and give everything back; idempotent."""


class Update:
    """What one reading or one resync changed.

    ``touched`` are all lifetimes that began, ended or are known better now, in the order of
    the changes: ``added`` began, ``removed`` were ended, and ``disturbed`` were changed by a
    late report about another one.
    """

    __slots__ = ("added", "disturbed", "is_resync", "losses", "removed", "touched")

    def __init__(self, is_resync: bool = False) -> None:
        self.is_resync = is_resync
        self.touched: list[Lifetime] = []
        self.added: list[Lifetime] = []
        self.removed: list[Lifetime] = []
        self.losses: list[Loss] = []
        self.disturbed: list[Lifetime] = []


class Tracker:
    """Drives a source into ``timeline``; ``note`` is given what changed, under ``lock``.

    ``now`` is CLOCK_MONOTONIC ns. ``lost`` is None while all that happened is known.
    Otherwise it spans the lost changes: what the timeline says of later than its
    ``until`` may be wrong.
    """

    def __init__(
        self,
        now: Callable[[], int],
        note: Callable[[Update], None],
        lock: AbstractContextManager[object],
    ) -> None:
        self.timeline = Timeline()
        self.changes = 0
        self.losses = 0
        self.resyncs = 0
        #: What happened before this has been read, in CLOCK_MONOTONIC ns.
        self.covered = 0
        self.lost: Loss | None = None
        #: No resync is due before this.
        self.resync_after = 0
        self._now = now
        self._note = note
        self._lock = lock
        self._count_at_expiry = 0

    def read(self, source: Readable) -> None:
        covered = self._now()
        self.apply(source.read(), covered)

    def apply(self, changes: Iterable[Change], covered: int = 0) -> None:
        """Take in changes; all that happened before ``covered`` is among them."""
        with self._lock:
            update = Update()
            self._apply(changes, update)
            self.covered = max(self.covered, covered)
            self._note(update)

    def resync(self, source: Readable, since: int = 0) -> None:
        """Make the timeline equal to the kernel's table.

        What differs changed after the first loss, or after ``since`` if there was none.
        SourceError if the source cannot enumerate and never has; later it is tried again.
        """
        began = self._now()
        try:
            snapshot = list(source.snapshot())
        except SourceError:
            if not self.resyncs:
                raise
            # The gap stays open until a resync succeeds.
            self.resync_after = self._now() + _RETRY_SPAN
            return
        ended = self._now()
        with self._lock:
            update = Update(is_resync=True)
            since = since if self.lost is None else self.lost.since
            self._end_gap(ended, update)
            # Also those that others were loaded over: they may show again when those end.
            live = {lifetime.symbol.start: lifetime for lifetime in self.timeline.open()}
            times = (since, began, ended)
            self._apply(differences(live, snapshot, source.lists_images, times), update)
            self.covered = max(self.covered, began)
            self._note(update)
            self.resyncs += 1
            self.resync_after = ended + _REST * (ended - began)
        self.read(source)

    def is_resync_due(self, now: int) -> bool:
        """Whether something was lost, and a resync is cheap enough by now."""
        return self.lost is not None and now >= self.resync_after

    def lose_track(self, since: int) -> None:
        """Note that from ``since`` on nobody follows the kernel, until a resync."""
        with self._lock:
            self._extend(Loss(since, since, "nobody followed"))

    def end_gap(self, until: int) -> None:
        """End the gap of a loss that no resync follows."""
        with self._lock:
            update = Update()
            self._end_gap(until, update)
            self._note(update)

    def forget(self, now: int) -> None:
        """Keep memory bounded: drop what ended long ago, and make that time a gap."""
        with self._lock:
            if self.timeline.count - self._count_at_expiry > MEMORY_COUNT:
                self.timeline.expire(now - MEMORY_SPAN)
                self.timeline.apply(Loss(0, now - MEMORY_SPAN, "forgotten"))
                self._count_at_expiry = self.timeline.count

    def _apply(self, changes: Iterable[Change], update: Update) -> None:
        timeline = self.timeline
        for change in changes:
            if isinstance(change, Loss):
                self.losses += 1
                self._lose(change, update)
                self._extend(change)
                continue
            if not isinstance(change, (Load, Unload)):
                raise TypeError(f"{change!r} is no change")
            self.changes += 1
            count = timeline.count
            lifetime = timeline.apply(change)
            if lifetime is not None:
                update.touched.append(lifetime)
                if timeline.count > count:
                    update.added.append(lifetime)
                elif isinstance(change, Unload):
                    update.removed.append(lifetime)
        update.disturbed = timeline.take_disturbed()
        update.touched += update.disturbed

    def _lose(self, loss: Loss, update: Update) -> None:
        self.timeline.apply(loss)
        update.losses.append(loss)

    def _extend(self, loss: Loss) -> None:
        first = self.lost
        if first is not None:
            since, until = min(first.since, loss.since), min(first.until, loss.until)
            loss = Loss(since, until, first.cause, first.count)
        self.lost = loss

    def _end_gap(self, until: int, update: Update) -> None:
        if self.lost is not None and until > self.lost.until:
            self._lose(Loss(self.lost.until, until, "until the resync"), update)
        self.lost = None
