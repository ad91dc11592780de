"""The perf_event source: the kernel's own side-band records, read as they come.

One dummy software event on each CPU asks for PERF_RECORD_KSYMBOL and PERF_RECORD_BPF_EVENT. It
needs Linux 5.1, and CAP_PERFMON or kernel.perf_event_paranoid at 0 or below. ``sample_id_all``
must stay off: with it the kernel pads the records of every older listener, which perf then
cannot read. So records carry no time, and a change is known to lie between two reads.
"""

from __future__ import annotations

import errno
import select
import time
from contextlib import ExitStack, closing

from ksym_plugin.kernel import privileges, syscalls
from ksym_plugin.kernel.perf_ring import Lost, PerCpuRings, Ring, parse
from ksym_plugin.kernel.snapshot import Taker
from ksym_plugin.kernel.syscalls import Ticker
from ksym_plugin.sources.sideband import Sideband
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import Loss
from ksym_plugin.timeline.tracker import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.kernel.perf_ring import Record
    from ksym_plugin.timeline.symbols import Load
    from ksym_plugin.timeline.tracker import Change

#: How often ``fileno`` becomes readable when nothing happens: bounds the windows of changes
#: after a quiet time, and how long a new CPU goes unnoticed.
TICK = 1.0
#: Room for records on each CPU.
RING_BYTES = 256 * 1024
_LOOKS = 8
_FLAGS = syscalls.KSYMBOL | syscalls.BPF_EVENT | syscalls.WATERMARK
_LOST_CAUSE = "perf ring full"
_SUSPECT_CAUSE = "perf ring nearly full"
_BROKEN_CAUSE = "perf records unreadable"
_HOTPLUG_CAUSE = "CPU came online"


class PerfEventSource(Source):
    """Changes from perf's side-band records; see ``Source`` for the protocol.

    A load lies between the read before the one that returns it and that one; where the program
    can still be opened, the start of its BPF_PROG_LOAD bounds the window too. Nothing a read
    returns happened before anything an earlier read returned, save for changes on CPUs that the
    two looked at while they happened; ``Sideband.changes`` orders those of one read.
    """

    name = "perf_event"

    def __init__(self) -> None:
        super().__init__()
        self._taker = Taker()
        self._sideband = Sideband()
        self._read_format = syscalls.FORMAT_LOST
        self._since = self._looked = time.monotonic_ns()
        with ExitStack() as stack:
            self._rings = stack.enter_context(closing(PerCpuRings()))
            self._epoll = stack.enter_context(closing(select.epoll()))
            self._ticker = stack.enter_context(closing(Ticker(TICK)))
            self._epoll.register(self._ticker.fd, select.EPOLLIN)
            for cpu in self._rings.look()[1]:
                self._open(cpu)
            if not self._rings.by_cpu:
                raise SourceError("no CPU accepts a perf event")
            self._stack = stack.pop_all()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def snapshot(self) -> list[Load]:
        taken = self._taker.take()
        self._sideband.know(taken.loads)
        self.notes = [taken.limit] if taken.limit else []
        self.lists_images = taken.lists_images
        return taken.loads

    def read(self) -> list[Change]:
        self._ticker.clear()
        changes: list[Change] = []
        is_due = time.monotonic_ns() - self._looked >= TICK * 1e9
        gone = self._follow_cpus(changes) if is_due else []
        rings = [*gone, *self._rings.by_cpu.values()]
        since, (before, heads, now) = self._since, _look(rings)
        self._since = before
        records = [
            self._take(ring, head, since, now, changes)
            for ring, head in zip(rings, heads)
            if ring.waiting(head)
        ]
        for ring in gone:
            ring.close()
        changes += self._sideband.changes(records, since, now) if records else ()
        return changes

    def close(self) -> None:
        self._stack.close()

    def _take(
        self, ring: Ring, head: int, since: int, now: int, changes: list[Change]
    ) -> list[Record]:
        """The records of a ring up to ``head``; what it lost joins ``changes``."""
        data, tight = ring.take(head)
        records, whole = parse(data)
        if not whole:
            changes.append(Loss(since, now, _BROKEN_CAUSE))
        reported = sum(record.count for record in records if isinstance(record, Lost))
        if reported or tight:
            lost = ring.newly_lost()
            # Asked only now, so it may count what was lost since ``now``.
            until = time.monotonic_ns()
            if lost is None:
                cause = _LOST_CAUSE if reported else _SUSPECT_CAUSE
                changes.append(Loss(since, until, cause, reported or None))
            elif lost:
                changes.append(Loss(since, until, _LOST_CAUSE, lost))
        return records

    def _open(self, cpu: int) -> bool:
        """Start listening on a CPU; False if it is offline."""
        # A watermark of one byte: ``wakeup_events`` would count samples, and there are none.
        attr = syscalls.perf_event_attr(
            flags=_FLAGS, wakeup_watermark=1, read_format=self._read_format
        )
        try:
            fd = syscalls.perf_event_open(attr, -1, cpu)
            ring = Ring(fd, RING_BYTES, bool(self._read_format))
        except OSError as error:
            if error.errno == errno.EINVAL and self._read_format:
                # PERF_FORMAT_LOST is younger than KSYMBOL; without it, full rings are guessed.
                self._read_format = 0
                return self._open(cpu)
            if error.errno == errno.ENODEV:
                return False
            raise privileges.perf_event_refusal(error, cpu) from error
        self._rings.by_cpu[cpu] = ring
        self._epoll.register(ring.fd, select.EPOLLIN)
        return True

    def _follow_cpus(self, changes: list[Change]) -> list[Ring]:
        """Open rings on CPUs that came; those of CPUs that went, for what they still hold."""
        since, self._looked = self._looked, time.monotonic_ns()
        gone, came = self._rings.look()
        for cpu in came:
            try:
                if not self._open(cpu):
                    # Gone again already: have another look at the next tick.
                    self._rings.look_again()
            except SourceError as error:
                self.notes.append(str(error))
            changes.append(Loss(since, time.monotonic_ns(), _HOTPLUG_CAUSE))
        return gone


def _look(rings: list[Ring]) -> tuple[int, list[int], int]:
    """All rings' heads at one instant, and times read before and after it.

    Heads that two looks in a row find the same did not change in between. So all rings had
    this state at once: no record is left for the next read that is older than one in this
    read. Where records never stop coming the last look has to do.
    """
    before = time.monotonic_ns()
    heads = [ring.head() for ring in rings]
    for _ in range(_LOOKS):
        again_before = time.monotonic_ns()
        again = [ring.head() for ring in rings]
        if again == heads:
            break
        before, heads = again_before, again
    return before, heads, time.monotonic_ns()
