"""Sources that say what a test has written down, and hosts that listen.

``Scripted`` hands out changes as a test puts them. ``Schedule`` makes up a kernel in which
who is where follows from the time by arithmetic alone: the oracle needs no memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ksym_hooks import hookimpl
from ksym_plugin.kernel.syscalls import Ticker
from ksym_plugin.timeline.tracker import Source
from tests.unit.helpers import BASE, load, unload

SLOTS = 50
STEP = 1_000_000
SIZE = 0x400


class Scripted(Source):
    """Changes go in with ``put``, and the descriptor becomes readable."""

    name = "scripted"

    def __init__(self, held=()):
        super().__init__()
        self.held = list(held)
        self.waiting = []
        self.error = None
        self.closed = 0
        self.reads = 0
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self):
        return self._read_fd

    def put(self, *changes):
        self.waiting += changes
        os.write(self._write_fd, b".")

    def fail(self, error):
        self.error = error
        os.write(self._write_fd, b".")

    def read(self):
        self.reads += 1
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        changes, self.waiting = self.waiting, []
        return changes

    def snapshot(self):
        return list(self.held)

    def close(self):
        self.closed += 1
        if self._read_fd >= 0:
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = -1


class Schedule(Source):
    """A change each ms: every slot is loaded for 50 ms, then empty for 50 ms, then another."""

    name = "schedule"

    def __init__(self):
        super().__init__()
        self.began = 0
        self.done = 0
        self._ticker = Ticker(0.005)

    def fileno(self):
        return self._ticker.fd

    def snapshot(self):
        return []

    def read(self):
        self._ticker.clear()
        now = time.monotonic_ns()
        self.began = self.began or now
        changes = []
        while self.began + self.done * STEP <= now:
            number, at = self.done, self.began + self.done * STEP
            slot, turn = number % SLOTS, number // SLOTS
            start, name = place(slot), name_of(slot, turn & ~1)
            if turn % 2:
                changes.append(unload(start, at, name))
            else:
                changes.append(load(start, SIZE, name, at))
            self.done += 1
        return changes

    def truth(self, slot, at):
        """Name and certainty at a time that is no change's; None before the first one."""
        number = (at - self.began) // STEP
        turn = (number - slot) // SLOTS
        if at < self.began or number < slot:
            return None
        return name_of(slot, turn & ~1), "grace" if turn % 2 else "exact"

    def close(self):
        self._ticker.close()


def place(slot):
    return BASE + slot * 0x1000


def name_of(slot, turn):
    return f"bpf_prog_{slot:08x}{turn:08x}_made"


class Offers:
    """A third party's plugin with one source, and how often it was started."""

    def __init__(self, name, construct):
        self.name = name
        self.construct = construct
        self.made = []

    @hookimpl
    def ksym_sources(self):
        return {self.name: self.start}

    def start(self):
        self.made.append(self.construct())
        return self.made[-1]


class Listener:
    """A host that keeps all it is told."""

    def __init__(self):
        self.changes = []
        self.losses = []

    @hookimpl
    def ksym_symbols_changed(self, added, removed, generation):
        self.changes.append(([s.name for s in added], [s.name for s in removed], generation))

    @hookimpl
    def ksym_events_lost(self, since, until, count):
        self.losses.append((since, until, count))


def ask(manager, addresses, time_ns=None, clock="monotonic"):
    """Answers as ``name certainty``, or the reason's text."""
    answers = manager.hook.ksym_resolve_frames(addresses=addresses, time=time_ns, clock=clock)
    return [
        f"{answer.name} {answer.certainty}" if hasattr(answer, "certainty") else answer.text
        for answer in answers
    ]


def wait_until(holds, seconds=10.0):
    """Ask again and again, for as long as anything may take on a busy machine."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def fds():
    """This process's descriptors, and what they are."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def _tasks():
    return set(os.listdir("/proc/self/task"))


#: Threads that Python's ``threading`` does not know, as those of a test runner's.
_FOREIGN = _tasks() - {str(thread.native_id) for thread in threading.enumerate()}


def tasks():
    """How many threads the kernel knows; it lists one for a moment after it was joined."""
    deadline = time.monotonic() + 5
    while True:
        found = len(_tasks() - _FOREIGN)
        if found <= threading.active_count() or time.monotonic() > deadline:
            return found
        time.sleep(0.001)
