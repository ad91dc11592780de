"""The records of the probe (bpf/ksym_events.c): how they come, what they say, what was lost.

They come through one ring, or through perf's buffers. bcc's callbacks read neither: an
exception in a ctypes callback is lost, and a call for each record costs more than all the rest.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from array import array
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Union

from ksym_plugin.kernel import syscalls
from ksym_plugin.kernel.perf_ring import (
    RECORD_SAMPLE,
    PerCpuRings,
    Ring,
    each_record,
    online_text,
    parse_cpu_list,
)
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    UNNAMED_BPF,
    Load,
    Loss,
    Symbol,
    Unload,
    bpf_kind,
    is_image,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ksym_plugin.timeline.tracker import Change

    Rings = Union["BpfRing", "PerfBuffers"]

#: The kinds of a change, which are also the keys of the map ``streams``.
ADD = 0
DEL = 1

#: struct record up to its name.
_HEAD = struct.Struct("=QQIIIIIHBB16s")
_STREAM = struct.Struct("=QQQ")
#: Numbers are 32 bits wide in records, and go round.
SEQ_MASK = 0xFFFFFFFF
_HALF = 1 << 31
CAUSE = "the probe's ring was full"

_RINGBUF = 27  # BPF_MAP_TYPE_RINGBUF
_CREATE = struct.Struct("=IIII")  # map_type, key_size, value_size, max_entries
_ELEMENT = struct.Struct("=IIQQQ")  # map_fd, padding, addresses of key and value, flags
#: A record's header in the ring (struct bpf_ringbuf_hdr): its length with two flags,
#: then a page offset of no use here.
_HEADER = 8
_BUSY = 1 << 31
_DISCARDED = 1 << 30
_WORD = struct.Struct("=I")
#: The least that a CPU's perf buffer has, however many CPUs share the memory.
_LEAST = 32 * 1024


class Record(NamedTuple):
    """One change of one symbol: struct record, field for field."""

    stamp: int
    start: int
    length: int
    seq: int
    prog_id: int
    pid: int
    tid: int
    cpu: int
    kind: int
    is_prog: int
    comm: str
    name: str

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """struct.error where ``data`` is too short."""
        *numbers, comm = _HEAD.unpack_from(data)
        return cls._make([*numbers, _text(comm), _text(data[_HEAD.size :])])


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


class Counts(NamedTuple):
    """What the probe has counted on one CPU for one kind of change, since it was loaded."""

    seq: int
    lost: int
    lost_images: int


def counts_of(map_fd: int, cpus: int) -> list[list[Counts]]:
    """What the map ``streams`` has: by kind of change, one Counts for each CPU there can be."""
    value = array("Q", bytes(_STREAM.size * cpus))
    found: list[list[Counts]] = []
    for kind in (ADD, DEL):
        _element(syscalls.MAP_LOOKUP_ELEM, map_fd, kind, value)
        found.append([Counts(*words) for words in _STREAM.iter_unpack(value)])
    return found


@dataclass
class _Stream:
    """The records of one kind on one CPU.

    ``seq`` is the last one's number, ``at`` a time (CLOCK_MONOTONIC ns) until which nothing is
    missing unreported. ``lost`` counts what is reported as lost, ``ahead`` what of that no gap
    in the numbers has shown yet.
    """

    seq: int
    lost: int
    at: int
    ahead: int = 0


class Streams:
    """All streams by kind and CPU, from the time ``at`` on, when the probe had counted ``base``."""

    def __init__(self, base: list[list[Counts]], at: int) -> None:
        self._streams = [
            [_Stream(counts.seq & SEQ_MASK, counts.lost, at) for counts in cpus] for cpus in base
        ]

    def note(self, record: Record) -> Loss | None:
        """Take in a record; the loss that its number shows, if any."""
        stream = self._streams[record.kind][record.cpu]
        step = (record.seq - stream.seq) & SEQ_MASK
        if not 0 < step < _HALF:
            # From before the base.
            return None
        shown = min(step - 1, stream.ahead)
        stream.ahead -= shown
        count = step - 1 - shown
        loss = Loss(stream.at, record.stamp, CAUSE, count) if count else None
        stream.seq = record.seq
        stream.lost += count
        stream.at = max(stream.at, record.stamp)
        return loss

    def compare(self, counted: list[list[Counts]], before: int, after: int) -> list[Loss]:
        """The losses that no gap in the numbers has shown.

        The probe's counts were read between ``before`` and ``after``; all records that there
        were had been noted by then.
        """
        losses: list[Loss] = []
        for stream, counts in zip(chain(*self._streams), chain(*counted)):
            count = counts.lost - stream.lost
            if count > 0:
                losses.append(Loss(stream.at, after, CAUSE, count))
                stream.lost += count
                stream.ahead += count
            if count > 0 or counts.seq & SEQ_MASK == (stream.seq + stream.ahead) & SEQ_MASK:
                # Not ``after``: more may have been lost since it was counted.
                stream.at = before
        return losses


def merged(losses: Iterable[Loss]) -> list[Loss]:
    """The same losses by time, those that overlap in one."""
    found: list[Loss] = []
    for loss in sorted(losses, key=lambda loss: loss.since):
        last = found[-1] if found else None
        if last is None or loss.since > last.until or last.cause != loss.cause:
            found.append(loss)
        else:
            count = (last.count or 0) + (loss.count or 0)
            found[-1] = Loss(last.since, max(last.until, loss.until), last.cause, count)
    return found


class Changes:
    """Turns records into changes.

    ``exact`` says whether a program's end is that of its code, and not of its pages.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        #: By start: the loads of subprograms whose program has not come, and the thread that
        #: loads them. The kernel announces subprograms before their program has an id.
        self._subprograms: dict[int, tuple[int, Load]] = {}

    def of(self, records: list[Record]) -> list[Change]:
        """The changes of one batch of records, by time.

        A subprogram that was in an earlier batch than its program comes again, with the
        program's id.
        """
        earlier = set(self._subprograms)
        changes: list[Change] = []
        for record in sorted(records, key=lambda record: (record.stamp, -record.kind)):
            start = record.start
            if record.kind == DEL:
                self._subprograms.pop(start, None)
                name, prog_id = record.name or None, record.prog_id or None
                changes.append(Unload(start, record.stamp, record.stamp, name, prog_id))
                continue
            load = self._load(record)
            if load.symbol.kind == BPF_PROG and load.prog_id is None:
                self._subprograms[start] = (record.tid, load)
                earlier.discard(start)
            elif load.symbol.kind == BPF_PROG:
                own = self._identify(record.tid, load.prog_id)
                changes += [sub for sub in own if sub.symbol.start in earlier]
            changes.append(load)
        return changes

    def forget(self) -> None:
        """After a loss it is not known any more which program a subprogram belongs to."""
        self._subprograms.clear()

    def _identify(self, tid: int, prog_id: int | None) -> list[Load]:
        """Give a thread's subprograms their program's id."""
        starts = [start for start, (loader, _) in self._subprograms.items() if loader == tid]
        own = [self._subprograms.pop(start)[1] for start in starts]
        for load in own:
            load.prog_id = prog_id
        return own

    def _load(self, record: Record) -> Load:
        name = record.name or UNNAMED_BPF
        kind = bpf_kind(name)
        symbol = Symbol(record.start, record.start + record.length, name, kind, BPF_MODULE)
        # A whole page is the kernel's answer for an image whose end it does not keep.
        rounded = record.length >= mmap.PAGESIZE if is_image(kind) else not self._exact
        prog_id, at = record.prog_id or None, record.stamp
        return Load(symbol, at, at, prog_id, rounded, record.pid, record.comm)


def has_ring() -> bool:
    """Whether this kernel has BPF_MAP_TYPE_RINGBUF; found out by making one."""
    attr = array("B", _CREATE.pack(_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE")) + bytes(56))
    try:
        fd = syscalls.bpf(syscalls.MAP_CREATE, attr)
    except OSError:
        return False
    os.close(fd)
    return True


def update(map_fd: int, key: int, value: int) -> None:
    """Write an element whose key and value have 32 bits."""
    _element(syscalls.MAP_UPDATE_ELEM, map_fd, key, array("I", (value,)))


def _element(command: int, map_fd: int, key: int, value: array[int]) -> None:
    """Read or write an element; ``value`` must have room for all of it."""
    keys = array("I", (key,))
    addresses = keys.buffer_info()[0], value.buffer_info()[0]
    syscalls.bpf(command, array("B", _ELEMENT.pack(map_fd, 0, *addresses, 0)))


def open_rings(map_fd: int, is_ring: bool, size: int, epoll: select.epoll) -> Rings:
    """The rings behind the map ``events``, of ``size`` bytes in all, a power of two.

    ``epoll`` becomes readable when there is something to take.
    """
    if is_ring:
        epoll.register(map_fd, select.EPOLLIN)
        return BpfRing(map_fd, size)
    share = size // len(parse_cpu_list(online_text()))
    return PerfBuffers(map_fd, max(_LEAST, 1 << (share.bit_length() - 1)), epoll)


class BpfRing:
    """A BPF_MAP_TYPE_RINGBUF, mapped; the map's descriptor stays the caller's.

    ``size`` is that of the data in bytes. OSError if it cannot be mapped.
    """

    def __init__(self, map_fd: int, size: int) -> None:
        self.size = size
        self._consumer = mmap.mmap(map_fd, mmap.PAGESIZE)
        try:
            # The data is mapped twice in a row, so that no record is ever cut.
            self._producer = mmap.mmap(
                map_fd, mmap.PAGESIZE + 2 * size, prot=mmap.PROT_READ, offset=mmap.PAGESIZE
            )
        except BaseException:
            self._consumer.close()
            raise
        self._tail = memoryview(self._consumer).cast("L")
        self._head = memoryview(self._producer)[: mmap.PAGESIZE].cast("L")
        self._data = memoryview(self._producer)[mmap.PAGESIZE :]

    def take(self) -> list[bytes]:
        """The records there are now; the kernel gets their room back."""
        tail, head = self._tail[0], self._head[0]
        # For machines with weak ordering: the vDSO has the read barrier between head and data.
        time.monotonic_ns()
        records: list[bytes] = []
        while tail < head:
            at = tail % self.size
            (header,) = _WORD.unpack_from(self._data, at)
            if header & _BUSY:
                # Not yet written to its end on some other CPU; the rest is behind it.
                break
            length = header & ~_DISCARDED
            at += _HEADER
            if not header & _DISCARDED:
                records.append(bytes(self._data[at : at + length]))
            tail += (_HEADER + length + 7) & ~7
        self._tail[0] = tail
        return records

    def follow_cpus(self) -> None:
        """All CPUs write to the one ring."""

    def close(self) -> None:
        """Idempotent."""
        for view in (self._tail, self._head, self._data):
            view.release()
        self._consumer.close()
        self._producer.close()


class PerfBuffers:
    """A perf event with a ring on each CPU, in a BPF_MAP_TYPE_PERF_EVENT_ARRAY.

    ``size`` is that of each ring in bytes. OSError if one cannot be opened.
    """

    def __init__(self, map_fd: int, size: int, epoll: select.epoll) -> None:
        self.size = size
        self._map_fd = map_fd
        self._epoll = epoll
        self._rings = PerCpuRings()
        #: Records of CPUs that are gone.
        self._left: list[bytes] = []
        try:
            for cpu in self._rings.look()[1]:
                self._open(cpu)
        except BaseException:
            self.close()
            raise

    def take(self) -> list[bytes]:
        """The records there are now; those of one CPU in their order."""
        records, self._left = self._left, []
        return records + [one for ring in self._rings.by_cpu.values() for one in _taken(ring)]

    def follow_cpus(self) -> None:
        """Open rings on CPUs that came, close those of CPUs that went."""
        gone, came = self._rings.look()
        for ring in gone:
            self._left += _taken(ring)
            ring.close()
        for cpu in came:
            try:
                self._open(cpu)
            except OSError:
                # Gone again, or no descriptor left for it. What it writes until the next
                # look is counted as lost by the probe.
                self._rings.look_again()

    def close(self) -> None:
        """Idempotent."""
        self._rings.close()

    def _open(self, cpu: int) -> None:
        attr = syscalls.perf_event_attr(
            config=syscalls.COUNT_SW_BPF_OUTPUT,
            flags=syscalls.WATERMARK,
            wakeup_watermark=1,
            sample_type=syscalls.SAMPLE_RAW,
            sample_period=1,
        )
        ring = Ring(syscalls.perf_event_open(attr, -1, cpu), self.size)
        try:
            self._epoll.register(ring.fd, select.EPOLLIN)
            update(self._map_fd, cpu, ring.fd)
        except BaseException:
            ring.close()
            raise
        self._rings.by_cpu[cpu] = ring


def _taken(ring: Ring) -> list[bytes]:
    """The records that a ring holds now: a word with its size precedes a sample's raw data."""
    data, _ = ring.drain()
    records: list[bytes] = []
    for kind, at, end in each_record(data):
        first = at + _WORD.size
        if kind == RECORD_SAMPLE and end >= first:
            records.append(data[first : min(first + _WORD.unpack_from(data, at)[0], end)])
    return records
