"""Kernel callchains sampled on all CPUs with perf_event_open(2), by ctypes and mmap alone.

What a host of ksym_hooks needs of its own; ksym_sampler.py and docs/tutorial.md use it. The
layouts are those of linux/perf_event.h. Needs root or CAP_PERFMON.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time

#: perf_event_open's number, from the kernel's tables of system calls.
NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
#: struct perf_event_attr as of Linux 4.1 (PERF_ATTR_SIZE_VER3): type, size, config,
#: sample_period, sample_type, read_format, flags and, at its end, clockid.
ATTR = struct.Struct("=IIQQQQQ44xi")
SOFTWARE, CPU_CLOCK = 1, 0
TID, TIME, CALLCHAIN = 1 << 1, 1 << 2, 1 << 5
EXCLUDE_USER, EXCLUDE_CALLCHAIN_USER, USE_CLOCKID = 1 << 4, 1 << 22, 1 << 25
CLOEXEC = 1 << 3
RECORD_LOST, RECORD_SAMPLE = 2, 9
#: data_head and data_tail in struct perf_event_mmap_page, counted in words of 8 bytes.
HEAD, TAIL = 128, 129
#: From PERF_CONTEXT_MAX on, entries of a callchain are markers.
MARKERS = 0xFFFF_FFFF_FFFF_F001
RING_BYTES = 256 * 1024


class Sampler:
    """A ring of samples for each CPU; a context manager. OSError where it may not be.

    ``pid`` is the one process to sample, or -1 for all. ``lost`` counts the samples for
    which a ring had no room.
    """

    def __init__(self, hertz=199, pid=-1):
        flags = EXCLUDE_USER | EXCLUDE_CALLCHAIN_USER | USE_CLOCKID
        kind, period = TID | TIME | CALLCHAIN, 1_000_000_000 // hertz
        what = (SOFTWARE, ATTR.size, CPU_CLOCK, period, kind, 0, flags, time.CLOCK_MONOTONIC)
        self.lost = 0
        self._rings = []
        try:
            for cpu in online():
                self._rings.append(Ring(perf_event_open(ATTR.pack(*what), pid, cpu)))
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for ring in self._rings:
            ring.close()

    def take(self):
        """The samples since the last call: pid, CLOCK_MONOTONIC ns, addresses innermost first."""
        for ring in self._rings:
            yield from self.samples(ring.take())

    def samples(self, data):
        at = 0
        while at < len(data):
            kind, _, size = struct.unpack_from("=IHH", data, at)
            if kind == RECORD_SAMPLE:
                pid, _, stamp, depth = struct.unpack_from("=IIQQ", data, at + 8)
                chain = struct.unpack_from(f"={depth}Q", data, at + 32)
                yield pid, stamp, [address for address in chain if address < MARKERS]
            elif kind == RECORD_LOST:
                self.lost += struct.unpack_from("=QQ", data, at + 8)[1]
            at += size


class Ring:
    """The mapped ring of an event, whose descriptor it owns."""

    def __init__(self, fd):
        self._fd = fd
        try:
            self._map = mmap.mmap(fd, mmap.PAGESIZE + RING_BYTES)
        except BaseException:
            os.close(fd)
            raise
        # A memoryview reads and writes a word at once; struct would do so byte by byte, while
        # the kernel writes.
        self._words = memoryview(self._map)[: mmap.PAGESIZE].cast("Q")

    def close(self):
        self._words.release()
        self._map.close()
        os.close(self._fd)

    def take(self):
        """The records that were written since the last call; the kernel gets their room back."""
        head, tail = self._words[HEAD], self._words[TAIL]
        time.monotonic_ns()  # has the read barrier that is due between head and records
        data = unrolled(self._map[mmap.PAGESIZE :], tail, head) if head != tail else b""
        self._words[TAIL] = head
        return data


def unrolled(ring, tail, head):
    """The bytes between two positions, which count on while the ring goes round."""
    first = tail % len(ring)
    last = first + head - tail
    return ring[first:last] + ring[: max(0, last - len(ring))]


def perf_event_open(attr, pid, cpu):
    """A descriptor, closed on exec; OSError as the kernel has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = NUMBERS[platform.machine()]
    fd = libc.syscall(number, attr, pid, cpu, -1, ctypes.c_ulong(CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def online():
    """The CPUs that are online; the kernel's list is such as ``0-3,6``."""
    with open("/sys/devices/system/cpu/online", encoding="ascii") as file:
        parts = [part.split("-") for part in file.read().split(",")]
    return [cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)]
