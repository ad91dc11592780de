"""perf's clock against the others.

perf stamps samples with the scheduler's clock unless ``-k`` says otherwise. That clock
cannot be read from user space, and it drifts against CLOCK_MONOTONIC, in which
everything here is kept. ``PerfClock`` reads both at one instant: renaming the calling
thread makes the kernel write a PERF_RECORD_COMM to every buffer that asked for it, one
of them stamped by perf's clock and one by CLOCK_MONOTONIC. The two stamps are taken
within a microsecond of each other.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from bisect import bisect_right

from ksym_plugin.kernel import syscalls
from ksym_plugin.kernel.perf_ring import RECORD_COMM, Ring, each_record
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PERF = "perf"
MONOTONIC = "monotonic"
BOOTTIME = "boottime"
REALTIME = "realtime"
CLOCKS = (PERF, MONOTONIC, BOOTTIME, REALTIME)

#: perf_event_attr: where its flag word and ``clockid`` lie, and the flag that makes
#: ``clockid`` count (include/uapi/linux/perf_event.h).
_FLAGS_AT = 40
_CLOCKID_AT = 92
_CLOCK_NAMES = {
    time.CLOCK_MONOTONIC: MONOTONIC,
    time.CLOCK_BOOTTIME: BOOTTIME,
    time.CLOCK_REALTIME: REALTIME,
}

#: Clocks drift apart less than this from one reading to the next, in ns.
_STEP = 1_000_000
_NEVER = -1

#: How often both clocks are read for one instant.
_READINGS = 3
_PR_SET_NAME = 15
_SAMPLE_TIME = 1 << 2
_WORD = struct.Struct("=Q")


class Instant:
    """All clocks at one instant, in ns; ``perf`` is None where perf's cannot be read."""

    __slots__ = ("boottime", "monotonic", "perf", "realtime")

    def __init__(self, monotonic: int, boottime: int, realtime: int, perf: int | None) -> None:
        self.monotonic = monotonic
        self.boottime = boottime
        self.realtime = realtime
        self.perf = perf


class ClockMap:
    """Times of any clock in CLOCK_MONOTONIC, from instants at which all were read.

    Between two instants the clocks are taken to drift evenly; before the first and
    after the last, not at all. Where a clock was set, or stood still, between two
    instants, times between them become a time before everything: no lifetime has it.
    """

    def __init__(self, instants: Iterable[Instant]) -> None:
        self._instants = sorted(instants, key=lambda instant: instant.monotonic)
        self._pairs: dict[str, tuple[list[int], list[int]]] = {}

    def knows(self, clock: str) -> bool:
        return clock == MONOTONIC or bool(self._table(clock)[0])

    def to_monotonic(self, clock: str, time_ns: int) -> int:
        """``time_ns`` of ``clock`` in CLOCK_MONOTONIC ns. KsymError if it was never read."""
        if clock == MONOTONIC:
            return time_ns
        theirs, ours = self._table(clock)
        if not theirs:
            raise KsymError(
                f"the history cannot place times of the {clock} clock",
                "record with: perf record -k CLOCK_MONOTONIC",
            )
        at = bisect_right(theirs, time_ns)
        if at == 0 or at == len(theirs):
            nearest = min(at, len(theirs) - 1)
            return time_ns - theirs[nearest] + ours[nearest]
        span = theirs[at] - theirs[at - 1]
        part = time_ns - theirs[at - 1]
        if abs(span - (ours[at] - ours[at - 1])) > _STEP:
            return _NEVER
        return ours[at - 1] + part * (ours[at] - ours[at - 1]) // span

    def _table(self, clock: str) -> tuple[list[int], list[int]]:
        table = self._pairs.get(clock)
        if table is None:
            theirs: list[int] = []
            ours: list[int] = []
            for instant in self._instants:
                value = getattr(instant, clock)
                if value is None:
                    continue
                while theirs and theirs[-1] >= value:
                    # Set back: times that it showed twice are those after the step.
                    theirs.pop()
                    ours.pop()
                theirs.append(value)
                ours.append(instant.monotonic)
            table = self._pairs[clock] = theirs, ours
        return table


def clock_of_attr(attr: bytes, byteorder: str = sys.byteorder) -> str | None:
    """The clock of the samples of an event, from its raw perf_event_attr; None if unknown."""
    if len(attr) < _FLAGS_AT + 8:
        return PERF
    is_little = byteorder == "little"
    order = "<" if is_little else ">"
    (flags,) = struct.unpack_from(order + "Q", attr, _FLAGS_AT)
    # The first bit-field of a word is its highest bit where bytes are big-endian.
    if not flags & (syscalls.USE_CLOCKID if is_little else (1 << 63) >> 25):
        return PERF
    if len(attr) < _CLOCKID_AT + 4:
        return None
    (clockid,) = struct.unpack_from(order + "i", attr, _CLOCKID_AT)
    return _CLOCK_NAMES.get(clockid)


class PerfClock:
    """Reads perf's clock beside the others; needs perf_event_paranoid at 2 or below.

    Where the kernel refuses, instants simply lack perf's time and ``problem`` says why.
    Use from one thread, the one whose name is renewed.
    """

    def __init__(self) -> None:
        self._rings: list[Ring] = []
        self.problem = ""
        try:
            for flags, clockid in ((0, 0), (syscalls.USE_CLOCKID, time.CLOCK_MONOTONIC)):
                self._rings.append(_open_comm_event(flags, clockid))
        except (OSError, KsymError) as error:
            self.close()
            self.problem = f"perf's clock cannot be read ({error})"

    def read(self) -> Instant:
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        monotonic = time.monotonic_ns()
        realtime = time.time_ns()
        pairs = [self._read_pair() for _ in range(_READINGS)] if self._rings else []
        # Between the two stamps of a pair a virtual CPU can stand still: the middle one counts.
        read = sorted((pair for pair in pairs if pair), key=lambda pair: pair[1] - pair[0])
        if not read:
            return Instant(monotonic, boottime, realtime, None)
        perf, then = read[len(read) // 2]
        shift = then - monotonic
        return Instant(monotonic + shift, boottime + shift, realtime + shift, perf)

    def _read_pair(self) -> tuple[int, int] | None:
        """perf's clock and CLOCK_MONOTONIC at one instant."""
        _renew_thread_name()
        perf, then = (_last_comm_time(ring) for ring in self._rings)
        return None if perf is None or then is None else (perf, then)

    def close(self) -> None:
        while self._rings:
            self._rings.pop().close()


def _open_comm_event(flags: int, clockid: int) -> Ring:
    """A dummy event of the calling thread that records nothing but its new names."""
    attr = syscalls.perf_event_attr(
        flags=flags
        | syscalls.COMM
        | syscalls.SAMPLE_ID_ALL
        | syscalls.EXCLUDE_KERNEL
        | syscalls.EXCLUDE_HV,
        clockid=clockid,
        sample_type=_SAMPLE_TIME,
    )
    return Ring(syscalls.perf_event_open(attr, 0, -1), mmap.PAGESIZE)


def _renew_thread_name() -> None:
    """Give the calling thread the name it has: enough for a PERF_RECORD_COMM."""
    import ctypes

    with open("/proc/thread-self/comm", "rb") as file:
        name = file.read().rstrip(b"\n")
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _last_comm_time(ring: Ring) -> int | None:
    """The stamp of the newest PERF_RECORD_COMM; empties the ring."""
    stamp = None
    data, _ = ring.drain()
    for kind, _, end in each_record(data):
        if kind == RECORD_COMM:
            # With PERF_SAMPLE_TIME alone the sample id is the time, at the record's end.
            (stamp,) = _WORD.unpack_from(data, end - _WORD.size)
    return stamp
