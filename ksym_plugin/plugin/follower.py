"""Keeps a table current in the background, from the best source there is.

A thread waits for the source, reads it at once, and notifies hosts of changes. It may use 1/150 of
a CPU: where changes would cost more, it rests between reads, up to 0.1 s. A question about a time
that has not been read yet reads the source itself: ``frames`` never answers from before that time.

- The source takes long to start: after a second, answers come from an enumeration, marked GAP,
  until it has started.
- The source fails: the time until it is open again is a gap.
- The host closes all descriptors: noticed within a second, as a failed source; nothing that was
  closed is closed again, as the numbers may be other files' by now.
- The process forks: the child keeps the table as it is, marked GAP from then on.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ksym_plugin.kernel import snapshot
from ksym_plugin.kernel.clocks import CLOCKS, MONOTONIC, ClockMap, PerfClock
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.kernel.modules import extents
from ksym_plugin.plugin.table import Table
from ksym_plugin.timeline.errors import KallsymsError, KsymError, SourceError
from ksym_plugin.timeline.symbols import Reason
from ksym_plugin.timeline.tracker import CLOCK_SPAN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ksym_plugin.kernel.clocks import Instant
    from ksym_plugin.plugin.table import Notice
    from ksym_plugin.timeline.symbols import Frame, Load
    from ksym_plugin.timeline.tracker import Change, Source


class Pipe:
    """Wakes who polls ``read_fd``; knows whether its descriptors are still its own."""

    __slots__ = ("_identity", "_write_fd", "read_fd")

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._identity = _identity(self.read_fd)

    def is_ours(self) -> bool:
        """Whether they are still open: their numbers may be another file's by now."""
        # Both ends have the same inode.
        return self._identity == _identity(self.read_fd) == _identity(self._write_fd)

    def wake(self) -> None:
        if self.is_ours():
            with contextlib.suppress(OSError):
                os.write(self._write_fd, b".")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self.read_fd, 4096)

    def close(self) -> None:
        """Idempotent."""
        fds = (self.read_fd, self._write_fd)
        self.read_fd = self._write_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_SECOND = 1_000_000_000
#: How long the first question waits for a source, and for the static symbols, in seconds.
START_TIMEOUT = 1.0
_STATICS_TIMEOUT = 10.0
#: How many ns pass for each ns of CPU, unless the longest rest (s) is too short for that; and
#: how much CPU may be saved up in quiet times, in ns.
_REST = 150
_MOST_REST = 0.1
_MOST_SAVED = 20_000_000
#: How many readings of all clocks stay: an hour's, at one each ten seconds.
_INSTANTS = 360
#: How often descriptors and modules, which give no notice, are checked, in seconds.
_HEARTBEAT = 1.0
#: How long to wait before a source that failed is opened again, in seconds.
_REOPEN = (1.0, 60.0)
#: How long ``stop`` waits for a source that is being opened, and a question for one that
#: is being read, in seconds.
_STOP_TIMEOUT = 5.0
_READ_TIMEOUT = 1.0

_FORKED = (
    "this process was forked: it answers as of then, and marks what may have changed since; "
    "stop the manager and start it again to follow the kernel here"
)
#: Objects whose descriptors the host has closed: finalising them would close others.
_abandoned: list[object] = []


class Disowned(Exception):
    """The descriptors are closed, and not by us."""


class _Guarded:
    """A source that is read only as long as the descriptors are this process's."""

    def __init__(self, source: Source, pipe: Pipe) -> None:
        self._source = source
        self._pipe = pipe
        # A third party's source may lack this attribute.
        self.lists_images = False

    def read(self) -> list[Change]:
        if not self._pipe.is_ours():
            raise Disowned("the host has closed the descriptors")
        return self._source.read()

    def snapshot(self) -> list[Load]:
        loads = self._source.snapshot()
        self.lists_images = bool(getattr(self._source, "lists_images", False))
        return loads


class Allowance:
    """What CPU time a thread may still use; ``now`` and ``used`` are its clocks, in ns."""

    def __init__(
        self,
        now: Callable[[], int] = time.monotonic_ns,
        used: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._read_now, self._read_used = now, used
        self._left = 0.0
        self._at, self._used = now(), used()

    def rest(self) -> float:
        """How long to wait now, in seconds, so as not to use more."""
        at, used = self._read_now(), self._read_used()
        left = min(self._left + (at - self._at) / _REST, _MOST_SAVED) - (used - self._used)
        self._at, self._used = at, used
        # What the longest rest does not make up for is forgiven: a burst has an end.
        self._left = max(left, -_MOST_REST * _SECOND / _REST)
        return max(0.0, -self._left * _REST / _SECOND)


class Follower:
    """Follows what ``open_source`` opens, on a thread of its own, until ``stop``.

    ``name`` is the source's in the sentences for the host's user that ``warn`` is called
    with. ``notify`` is called with notices on that thread, in order. Neither may raise.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], Source],
        notify: Callable[[Notice], None],
        warn: Callable[[str], None],
    ) -> None:
        self.table = Table()
        self._name = name
        self._open_source = open_source
        self._notify = notify
        self._warn = warn
        self._source: Source | None = None
        # Guards the source. Taken before the table's lock, never after it.
        self._using = threading.Lock()
        self._asking = 0
        self._failure: Exception | None = None
        self._pipe = Pipe()
        self._clock: PerfClock | None = None
        self._instants: deque[Instant] = deque(maxlen=_INSTANTS)
        self._clocks = ClockMap(())
        self._stopping = threading.Event()
        self._has_statics = threading.Event()
        self._has_started = threading.Event()
        self._awaits_start = True
        self._is_forked = False
        self._modules: dict[str, tuple[int, int]] | None = None
        self._ticked = self._looked = 0
        self._thread = threading.Thread(target=self._work, name="ksym", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._pipe.close()
            raise

    def wait_started(self, seconds: float) -> bool:
        """Wait until the kernel is followed, or cannot be; whether that is so."""
        return self._has_started.wait(seconds)

    def frames(
        self, addresses: Iterable[int], time_ns: int | None, clock: str
    ) -> list[Frame | Reason]:
        """An answer for each address; see the hook ``ksym_resolve_frames``."""
        if self._awaits_start:
            self._await_start()
        table, tracker = self.table, self.table.tracker
        if time_ns is None:
            # Where nothing follows any more, it is the state of now, which is uncertain.
            followed = tracker.lost is None
            return table.frames(addresses, tracker.covered if followed else time.monotonic_ns())
        if clock != MONOTONIC:
            try:
                time_ns = self._to_monotonic(clock, time_ns)
            except KsymError as error:
                reason = Reason(str(error))
                return [reason for _ in addresses]
        late = time_ns > tracker.covered and not self._catch_up(time_ns)
        return table.frames(addresses, time_ns, late)

    def start_of(self, name: str) -> int | None:
        """Where the kernel symbol of this name is now; None if there is none."""
        if self._awaits_start:
            self._await_start()
        return self.table.start_of(name)

    def stop(self) -> None:
        """End the thread and give everything back; idempotent, from any thread."""
        self._stopping.set()
        self._pipe.wake()
        if self._thread is not threading.current_thread():
            # One that hangs in opening a source ends when that does.
            self._thread.join(_STOP_TIMEOUT)

    def after_fork_in_child(self) -> None:
        """Keep the table, whose lock is held; give back what only the parent may use."""
        self._is_forked = self._awaits_start = True
        self.table.tracker.lose_track(time.monotonic_ns())
        self.table.take_notices()
        # The threads that held these are not in the child.
        self._using = threading.Lock()
        self._stopping = threading.Event()
        self._has_statics, self._has_started = threading.Event(), threading.Event()
        self._give_back(self._pipe.is_ours())

    def _to_monotonic(self, clock: str, time_ns: int) -> int:
        if clock not in CLOCKS:
            raise KsymError(f"there is no clock called {clock}")
        return self._clocks.to_monotonic(clock, time_ns)

    def _await_start(self) -> None:
        """Wait for the first state that can answer; warn of what it lacks."""
        if self._is_forked:
            self._awaits_start = False
            if not self.table.generation:
                self._fill()
            self._warn(_FORKED)
            return
        self._has_statics.wait(_STATICS_TIMEOUT)
        if not self._has_started.wait(START_TIMEOUT):
            self._fill()
            if self._awaits_start:
                self._warn(
                    f"source {self._name} has not started after {START_TIMEOUT:g} s; "
                    "until it has, answers are marked as uncertain"
                )
        self._awaits_start = False

    def _catch_up(self, until: int) -> bool:
        """Read what happened before ``until``, if the source can be read at any time."""
        thread, tracker = threading.get_ident(), self.table.tracker
        # A signal handler that has interrupted this very thread here need not wait.
        if self._is_forked or self._asking == thread:
            return False
        if not self._using.acquire(timeout=_READ_TIMEOUT):
            # The thread that has it may have read so far already.
            return tracker.covered >= until
        try:
            self._asking = thread
            source = self._source
            if source is None or source.fileno() < 0:
                return False
            if tracker.covered < until:
                tracker.read(_Guarded(source, self._pipe))
        except Exception as error:  # noqa: BLE001 - any source's; the thread deals with it
            self._failure = error
            tracker.lose_track(tracker.covered)
            return False
        finally:
            self._asking = 0
            self._using.release()
            if self._failure is not None or self.table.has_notices:
                # Wake the thread: what would have woken it has been read here.
                self._pipe.wake()
        return tracker.covered >= until

    def _work(self) -> None:
        """What the thread does."""
        shortest, longest = _REOPEN
        pause = 0.0
        while not self._stopping.wait(pause):
            began = time.monotonic()
            try:
                self._follow(self._open())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - any source's
                self._has_statics.set()
                if not self._fail(error):
                    break
            has_lasted = time.monotonic() - began > longest
            pause = shortest if has_lasted or not pause else min(pause * 2, longest)
        with self._using:
            self._give_back(self._pipe.is_ours())

    def _open(self) -> Source:
        self._clock = PerfClock()
        self._tick(time.monotonic_ns())
        self._look_at_modules()
        self._has_statics.set()
        source = self._open_source()
        with self._using:
            self._source = source
            self.table.tracker.resync(_Guarded(source, self._pipe))
        self._has_started.set()
        return source

    def _follow(self, source: Source) -> None:
        """Read the source whenever it has something, until told to stop."""
        poller = select.poll()
        poller.register(self._pipe.read_fd, select.POLLIN)
        if source.fileno() >= 0:
            poller.register(source.fileno(), select.POLLIN)
        self._notify_all()
        wait = _HEARTBEAT if source.interval is None else min(source.interval, _HEARTBEAT)
        allowance = Allowance()
        while not self._stopping.is_set():
            ready = poller.poll(1000 * wait)
            if any(event & select.POLLNVAL for _, event in ready):
                raise Disowned("a descriptor is closed")
            self._step(source)
            self._stopping.wait(allowance.rest())

    def _step(self, source: Source) -> None:
        with self._using:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            tracker, guarded = self.table.tracker, _Guarded(source, self._pipe)
            tracker.read(guarded)
            now = time.monotonic_ns()
            if tracker.is_resync_due(now):
                tracker.resync(guarded)
        self._pipe.clear()
        self._notify_all()
        if now - self._looked >= _HEARTBEAT * _SECOND:
            self._looked = now
            self._look_at_modules()
            tracker.forget(now)
        if now - self._ticked >= CLOCK_SPAN:
            self._tick(now)

    def _notify_all(self) -> None:
        for notice in self.table.take_notices():
            self._notify(notice)

    def _fail(self, error: BaseException) -> bool:
        """Give up the source; returns whether to try again."""
        self.table.tracker.lose_track(self.table.tracker.covered)
        is_ours = self._pipe.is_ours() and not isinstance(error, Disowned)
        with self._using:
            self._give_back(is_ours)
            if not self._stopping.is_set():
                self._pipe = Pipe()
        if isinstance(error, Disowned):
            self._warn("the host has closed all descriptors; the source is opened again")
            return True
        self._warn(f"source {self._name}: {error if isinstance(error, KsymError) else repr(error)}")
        if self._has_started.is_set():
            return True
        # A source that could not start will not start later either.
        self._fill()
        self._has_started.set()
        return False

    def _give_back(self, is_ours: bool) -> None:
        """Close what there is. What is not ours is never closed, not even when finalised."""
        things = (self._source, self._clock, self._pipe)
        self._source = self._clock = None
        if not is_ours:
            _abandoned.append(things)
        for thing in things if is_ours else ():
            if thing is not None:
                with contextlib.suppress(Exception):
                    thing.close()

    def _fill(self) -> None:
        """Take in an enumeration of the kernel's symbols, where there is no source."""
        with contextlib.suppress(SourceError):
            self.table.fill(snapshot.take().loads)

    def _tick(self, now: int) -> None:
        if self._clock is not None:
            self._instants.append(self._clock.read())
            # A new object each time, as others read it without a lock.
            self._clocks = ClockMap(self._instants)
        self._ticked = now

    def _look_at_modules(self) -> None:
        """Read the static symbols anew when modules have come or gone."""
        modules = extents()
        if modules == self._modules:
            return
        self._modules = modules
        kallsyms = None
        with contextlib.suppress(KallsymsError):
            kallsyms = Kallsyms.load()
        self.table.use_statics(kallsyms)
