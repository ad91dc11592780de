"""The ring buffers of perf events, and the records in them."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time

from ksym_plugin.kernel.identity import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Union

    Record = Union["KSymbol", "BpfEvent", "Lost"]

ONLINE = "/sys/devices/system/cpu/online"
POSSIBLE = "/sys/devices/system/cpu/possible"

# enum perf_event_type
RECORD_LOST = 2
RECORD_COMM = 3
RECORD_SAMPLE = 9
RECORD_KSYMBOL = 17
RECORD_BPF_EVENT = 18

# enum perf_record_ksymbol_type
KSYMBOL_BPF = 1
KSYMBOL_OOL = 2
#: PERF_RECORD_KSYMBOL_FLAGS_UNREGISTER
UNREGISTER = 1
# enum perf_bpf_event_type
PROG_LOAD = 1
PROG_UNLOAD = 2

_HEADER = struct.Struct("=IHH")  # type, misc, size
_KSYMBOL = struct.Struct("=QIHH")  # addr, len, ksym_type, flags
_BPF_EVENT = struct.Struct("=HHI8s")  # type, flags, id, tag
_LOST = struct.Struct("=QQ")  # id, lost; read(2) gives the count and lost

# Words of 8 bytes in struct perf_event_mmap_page.
_DATA_HEAD = 128
_DATA_TAIL = 129
#: With less room than this left a record may have been refused. The longest has a name
#: of 512 bytes and what other listeners made the kernel append.
_TIGHT = 4096


def online_text() -> str:
    """The kernel's list, such as ``0-3,6``; cheap to compare with an earlier one."""
    return read_text(ONLINE).strip() or f"0-{(os.cpu_count() or 1) - 1}"


def possible_count() -> int:
    """How many CPUs there can be: so many values a per-CPU map has."""
    with open(POSSIBLE, encoding="ascii") as file:
        return parse_cpu_list(file.read().strip())[-1] + 1


def parse_cpu_list(text: str) -> list[int]:
    """The CPUs of a list in the kernel's notation."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class KSymbol:
    """PERF_RECORD_KSYMBOL: a symbol comes, or goes (``unregister``)."""

    def __init__(self, start: int, length: int, type: int, unregister: bool, name: str) -> None:
        self.start = start
        self.length = length
        self.type = type
        self.unregister = unregister
        self.name = name


class BpfEvent:
    """PERF_RECORD_BPF_EVENT: a program was loaded or unloaded; follows its KSYMBOLs.

    ``id`` is 0 for an unload on kernels that gave the id back first (5.19 to 6.1).
    """

    def __init__(self, type: int, id: int, tag: str) -> None:
        self.type = type
        self.id = id
        self.tag = tag


class Lost:
    """PERF_RECORD_LOST: ``count`` records found no room before this one."""

    def __init__(self, count: int) -> None:
        self.count = count


def each_record(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Type, start of the body and end of each record; a size that leads nowhere is the end."""
    at = 0
    while at + _HEADER.size <= len(data):
        kind, _, size = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            return
        yield kind, at + _HEADER.size, at + size
        at += size


def parse(data: bytes) -> tuple[list[Record], bool]:
    """The records in ``data``, and whether all of it could be read.

    Records of other types, and those too short for what they should hold, are skipped.
    """
    records: list[Record] = []
    whole, end = True, 0
    for kind, at, end in each_record(data):
        record = _record(kind, data, at, end)
        if record is not None:
            records.append(record)
        elif kind in (RECORD_KSYMBOL, RECORD_BPF_EVENT, RECORD_LOST):
            whole = False
    return records, whole and end == len(data)


def _record(kind: int, data: bytes, at: int, end: int) -> Record | None:
    if kind == RECORD_KSYMBOL and end >= at + _KSYMBOL.size:
        start, length, type_, flags = _KSYMBOL.unpack_from(data, at)
        name_at = at + _KSYMBOL.size
        name_end = data.find(b"\0", name_at, end)
        if name_end < 0:
            return None
        name = data[name_at:name_end].decode("utf-8", "backslashreplace")
        return KSymbol(start, length, type_, bool(flags & UNREGISTER), name)
    if kind == RECORD_BPF_EVENT and end >= at + _BPF_EVENT.size:
        type_, _, program_id, tag = _BPF_EVENT.unpack_from(data, at)
        return BpfEvent(type_, program_id, tag.hex())
    if kind == RECORD_LOST and end >= at + _LOST.size:
        return Lost(_LOST.unpack_from(data, at)[1])
    return None


class Ring:
    """The records of an event, mapped; owns the event's file descriptor ``fd``.

    ``lost_at_read``: reading the event tells how many records were lost (PERF_FORMAT_LOST).
    """

    def __init__(self, fd: int, size: int, lost_at_read: bool = False) -> None:
        """``size`` is that of the data in bytes, of which less has to do where less may be locked.

        Takes ``fd`` over, also when the mapping fails with OSError.
        """
        self.fd = fd
        self.lost_at_read = lost_at_read
        self._lost = 0
        try:
            self._map = _map(fd, size)
        except BaseException:
            os.close(fd)
            raise
        whole = memoryview(self._map)
        self._words = whole[: mmap.PAGESIZE].cast("Q")
        self._data = whole[mmap.PAGESIZE :]
        self._size = len(self._data)

    def close(self) -> None:
        """Unmap and close; idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._data.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    def head(self) -> int:
        """Where the kernel will write next."""
        return self._words[_DATA_HEAD]

    def waiting(self, head: int) -> bool:
        """Whether there is anything to take up to ``head``."""
        return head != self._words[_DATA_TAIL]

    def take(self, head: int) -> tuple[bytes, bool]:
        """The bytes up to ``head``; whether the ring was so full that records may be lost.

        The kernel gets their room back. A clock must have been read since ``head`` was: it
        is the read barrier between the two (the vDSO has one) that machines with weak
        ordering need.
        """
        tail = self._words[_DATA_TAIL]
        data = unrolled(self._data, tail, head)
        self._words[_DATA_TAIL] = head
        return data, head - tail > self._size - min(_TIGHT, self._size // 2)

    def drain(self) -> tuple[bytes, bool]:
        """What ``take`` returns for all that the kernel has written."""
        head = self.head()
        time.monotonic_ns()  # The read barrier.
        return self.take(head)

    def newly_lost(self) -> int | None:
        """How many records were lost since the last call; None if the kernel cannot say."""
        if not self.lost_at_read:
            return None
        before, self._lost = self._lost, _LOST.unpack(os.read(self.fd, _LOST.size))[1]
        return self._lost - before


class PerCpuRings:
    """The rings of one event on each CPU that is online, by CPU; follows hot-plug."""

    def __init__(self) -> None:
        self.by_cpu: dict[int, Ring] = {}
        self._gone: list[Ring] = []
        self._online = ""

    def look(self) -> tuple[list[Ring], list[int]]:
        """The rings of CPUs that went since the last look, and the CPUs that came.

        The caller closes those rings, which stay silent even if the CPU comes back, and
        puts rings for the new CPUs into ``by_cpu``. Rings that it leaves open, because taking
        their records has failed, go with the others.
        """
        text = online_text()
        if text == self._online:
            return [], []
        self._online = text
        online = parse_cpu_list(text)
        gone = [self.by_cpu.pop(cpu) for cpu in set(self.by_cpu).difference(online)]
        self._gone = [*(ring for ring in self._gone if ring.fd >= 0), *gone]
        return gone, [cpu for cpu in online if cpu not in self.by_cpu]

    def look_again(self) -> None:
        """Have the next look name the CPUs once more that have no ring yet."""
        self._online = ""

    def close(self) -> None:
        """Idempotent."""
        for ring in (*self.by_cpu.values(), *self._gone):
            ring.close()
        self.by_cpu.clear()
        self._gone.clear()


def unrolled(data: memoryview, tail: int, head: int) -> bytes:
    """What lies between two positions that count on while the ring goes round."""
    size = len(data)
    if not 0 <= head - tail <= size:
        # Only a broken ring: the kernel never overtakes the tail.
        return b""
    first = tail % size
    last = first + (head - tail)
    if last <= size:
        return bytes(data[first:last])
    return bytes(data[first:]) + bytes(data[: last - size])


def _map(fd: int, size: int) -> mmap.mmap:
    """Map a ring, smaller where perf_event_mlock_kb does not allow the full size."""
    size = max(size, mmap.PAGESIZE)
    while True:
        try:
            return mmap.mmap(fd, mmap.PAGESIZE + size)
        except OSError as error:
            if error.errno != errno.EPERM or size <= mmap.PAGESIZE:
                raise
            size //= 2
