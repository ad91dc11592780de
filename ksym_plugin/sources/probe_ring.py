"""The two ways in which records come out of the kernel: one ring, or perf's buffers.

Both are read here, and not through bcc's callbacks: an exception in a ctypes callback is
lost, and a call for each record costs more than all the rest.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from array import array

from ksym_plugin.kernel import syscalls
from ksym_plugin.kernel.perf_ring import (
    RECORD_SAMPLE,
    PerCpuRings,
    Ring,
    each_record,
    online_text,
    parse_cpu_list,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union

    Rings = Union["BpfRing", "PerfBuffers"]

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


def lookup(map_fd: int, key: int, value: array[int]) -> None:
    """Read an element with a 32-bit key into ``value``, which must have room for all of it."""
    _element(syscalls.MAP_LOOKUP_ELEM, map_fd, key, value)


def update(map_fd: int, key: int, value: array[int]) -> None:
    """Write an element with a 32-bit key."""
    _element(syscalls.MAP_UPDATE_ELEM, map_fd, key, value)


def has_ring() -> bool:
    """Whether this kernel has BPF_MAP_TYPE_RINGBUF; found out by making one."""
    attr = array("B", _CREATE.pack(_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE")) + bytes(56))
    try:
        fd = syscalls.bpf(syscalls.MAP_CREATE, attr)
    except OSError:
        return False
    os.close(fd)
    return True


def _element(command: int, map_fd: int, key: int, value: array[int]) -> None:
    keys = array("I", (key,))
    addresses = keys.buffer_info()[0], value.buffer_info()[0]
    syscalls.bpf(command, array("B", _ELEMENT.pack(map_fd, 0, *addresses, 0)))


def open_rings(map_fd: int, is_ring: bool, size: int) -> Rings:
    """The rings behind the map ``events``, of ``size`` bytes in all, a power of two."""
    if is_ring:
        return BpfRing(map_fd, size)
    share = size // len(parse_cpu_list(online_text()))
    return PerfBuffers(map_fd, max(_LEAST, 1 << (share.bit_length() - 1)))


class BpfRing:
    """A BPF_MAP_TYPE_RINGBUF, mapped; the map's descriptor stays the caller's.

    ``size`` is that of the data in bytes. OSError if it cannot be mapped.
    """

    def __init__(self, map_fd: int, size: int) -> None:
        self.fds = [map_fd]
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
        # A read barrier between the head and the data before it, for machines with
        # weak ordering: the vDSO has one.
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

    def follow_cpus(self) -> list[int]:
        """No new descriptors: all CPUs write to the one ring."""
        return []

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

    def __init__(self, map_fd: int, size: int) -> None:
        self.size = size
        self._map_fd = map_fd
        self._rings = PerCpuRings()
        self._started = False
        #: Records of CPUs that are gone.
        self._left: list[bytes] = []
        try:
            self.follow_cpus()
        except BaseException:
            self.close()
            raise

    @property
    def fds(self) -> list[int]:
        return [ring.fd for ring in self._rings.by_cpu.values()]

    def take(self) -> list[bytes]:
        """The records there are now; those of one CPU in their order."""
        rings = list(self._rings.by_cpu.values())
        records, self._left = self._left, []
        return records + _taken(rings)

    def follow_cpus(self) -> list[int]:
        """Open rings on CPUs that came, close those of CPUs that went; the new descriptors."""
        gone, came = self._rings.look()
        for ring in gone:
            self._left += _taken([ring])
            ring.close()
        opened: list[int] = []
        for cpu in came:
            try:
                opened.append(self._open(cpu))
            except OSError:
                if not self._started:
                    raise
                # Gone again, or no descriptor left for it. What it writes until the next
                # look is counted as lost by the probe.
                self._rings.look_again()
        self._started = True
        return opened

    def close(self) -> None:
        """Idempotent."""
        self._rings.close()

    def _open(self, cpu: int) -> int:
        attr = syscalls.perf_event_attr(
            config=syscalls.COUNT_SW_BPF_OUTPUT,
            flags=syscalls.WATERMARK,
            wakeup_watermark=1,
            sample_type=syscalls.SAMPLE_RAW,
            sample_period=1,
        )
        ring = Ring(syscalls.perf_event_open(attr, -1, cpu), self.size)
        try:
            update(self._map_fd, cpu, array("I", (ring.fd,)))
        except BaseException:
            ring.close()
            raise
        self._rings.by_cpu[cpu] = ring
        return ring.fd


def _taken(rings: list[Ring]) -> list[bytes]:
    """The records that rings hold now."""
    heads = [ring.head() for ring in rings]
    time.monotonic_ns()  # The barrier that Ring.take asks for.
    records: list[bytes] = []
    for ring, head in zip(rings, heads):
        if ring.waiting(head):
            records += _samples(ring.take(head)[0])
    return records


def _samples(data: bytes) -> list[bytes]:
    """The raw data of the samples among perf's records: a word with its size precedes it."""
    found: list[bytes] = []
    for kind, at, end in each_record(data):
        if kind == RECORD_SAMPLE and end >= at + _WORD.size:
            first = at + _WORD.size
            found.append(data[first : min(first + _WORD.unpack_from(data, at)[0], end)])
    return found
