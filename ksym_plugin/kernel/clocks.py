"""perf's clock against the others.

perf stamps samples with the scheduler's clock unless ``-k`` says otherwise. That clock
cannot be read from user space, and it drifts against CLOCK_MONOTONIC. ``PerfClock`` reads
both: renaming the calling thread makes the kernel write a PERF_RECORD_COMM to every buffer
that asked for it, one stamped by perf's clock and one by CLOCK_MONOTONIC, within a
microsecond of each other.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from bisect import bisect_left, bisect_right
from itertools import accumulate

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

#: Where perf_event_attr (include/uapi/linux/perf_event.h) has its flag word and ``clockid``.
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
#: A dummy event of the calling thread that records nothing but its new names.
_COMM_ALONE = syscalls.COMM | syscalls.SAMPLE_ID_ALL | syscalls.EXCLUDE_KERNEL | syscalls.EXCLUDE_HV
_WORD = struct.Struct("=Q")


class Instant:
    """All clocks at one instant, in ns; ``perf`` is None where perf's cannot be read."""

    def __init__(self, monotonic: int, boottime: int, realtime: int, perf: int | None) -> None:
        self.monotonic = monotonic
        self.boottime = boottime
        self.realtime = realtime
        self.perf = perf


class _Segment:
    """A clock between two readings of it, each its time and CLOCK_MONOTONIC's, in ns.

    Before the first reading and after the last both are the same one. Meanwhile the clock
    showed nothing before ``first`` and nothing after ``last``, unless it was set more than once.
    """

    def __init__(self, began: tuple[int, int], ended: tuple[int, int]) -> None:
        self._began, self._since = began
        self.last, self._until = ended
        self.first, self._span = self._began, self.last - self._began
        length = self._until - self._since
        self._is_steady = self._span > 0 and abs(self._span - length) <= _STEP
        if not self._is_steady:
            self.first = min(self.first, self.last - length)
            self.last = max(self.last, self._began + length)

    def place(self, shown: int) -> tuple[int, int]:
        """From when to when it can have shown a time; one instant if it drifted evenly."""
        part, span = shown - self._began, self._span
        if self._is_steady:
            place = self._since + part * (self._until - self._since) // span
            return place, place
        if self._since == self._until and not span:  # Before the first reading or after the last.
            return self._since + part, self._since + part
        # It was set, or stood still: before that the time is as far from the first reading as
        # it was shown, and behind that from the last one.
        places = self._since + part, self._until + part - span
        return max(self._since, min(places)), min(self._until, max(places))

    def last_before(self, until: int, shown: int) -> int:
        """What it shows last no later than ``until``, or ``shown`` where that is not known."""
        length = self._until - self._since
        if self._is_steady and length > 0:
            # Places are rounded down.
            return self._began + ((until - self._since + 1) * self._span - 1) // length
        if length or self._span:
            return shown
        return self._began + until - self._since


class _Readings:
    """One reading or more of a clock beside CLOCK_MONOTONIC: its time and ours, by ours."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self._pairs = pairs
        self._ours = [ours for _, ours in pairs]
        # Before the first reading, between each two, and after the last.
        ends = [pairs[0], *pairs, pairs[-1]]
        self._segments = [_Segment(*both) for both in zip(ends, ends[1:])]
        # Where one segment ends the next begins. So the first to show a time is the first to get
        # so far, and the last is the last that begins as low.
        lasts = [segment.last for segment in self._segments[:-1]]
        self._lasts = list(accumulate(lasts, max))
        #: The same without the time before the first reading.
        self._later_lasts = list(accumulate(lasts[1:], max))
        firsts = [segment.first for segment in self._segments[:0:-1]]
        self._firsts = list(accumulate(firsts, min))[::-1]

    def place(self, shown: int) -> tuple[int, int]:
        """From when to when the clock can have shown a time."""
        first, last = bisect_left(self._lasts, shown), bisect_right(self._firsts, shown)
        place = self._segments[first].place(shown)
        if place[0] < 0 < last:  # That would be before the boot.
            first = 1 + bisect_left(self._later_lasts, shown)
            place = self._segments[first].place(shown)
        return place if first == last else (place[0], self._segments[last].place(shown)[1])

    def last_before(self, until: int, shown: int) -> int:
        """The last time that is shown no later than ``until``; each from ``shown`` to it was
        shown once. ``shown`` itself where no later one is known."""
        at, last = bisect_left(self._lasts, shown), bisect_right(self._firsts, shown)
        segment = self._segments[at]
        if at != last or segment.place(shown)[0] < 0:
            return shown
        ends = [*self._lasts[at : at + 1], *(first - 1 for first in self._firsts[at : at + 1])]
        return max(shown, min([segment.last_before(until, shown), *ends]))

    def shown(self, time_ns: int) -> int:
        """What the clock shows at a time of ours, if it drifts evenly between readings."""
        at = bisect_right(self._ours, time_ns)
        nearest = self._pairs[min(at, len(self._pairs) - 1)]
        before = self._pairs[at - 1] if at else nearest
        if before[1] == nearest[1]:
            return nearest[0] + time_ns - nearest[1]
        part = (time_ns - before[1]) * (nearest[0] - before[0])
        # Rounded up, as places are rounded down: a time is shown as it was given.
        return before[0] - -part // (nearest[1] - before[1])


class ClockMap:
    """Times of any clock in CLOCK_MONOTONIC, from instants at which all were read.

    Between two instants the clocks are taken to drift evenly; before the first and
    after the last, not at all. Where a clock was set, or stood still, between two
    instants, a time between them is a window: whenever the clock can have shown it.
    KsymError for a clock that was never read.
    """

    def __init__(self, instants: Iterable[Instant]) -> None:
        self._instants = sorted(instants, key=lambda instant: instant.monotonic)
        self._readings: dict[str, _Readings | None] = {}

    def knows(self, clock: str) -> bool:
        return clock == MONOTONIC or self._read(clock) is not None

    def window(self, clock: str, first: int, last: int) -> tuple[int, int]:
        """From when to when ``clock`` can have shown ``first`` to ``last``, CLOCK_MONOTONIC ns."""
        if clock == MONOTONIC:
            return first, last
        readings = self._readings.get(clock) or self._known(clock)
        since, until = readings.place(first)
        if last == first:
            return since, until
        low, high = readings.place(last)
        return min(since, low), max(until, high)

    def last_before(self, clock: str, until: int, shown: int) -> int:
        """The last time that ``clock`` shows no later than ``until`` (CLOCK_MONOTONIC ns).

        Each time from ``shown`` to it is shown once. It is ``shown`` where no later one is known.
        """
        if clock == MONOTONIC:
            return max(until, shown)
        return self._known(clock).last_before(until, shown)

    def to_monotonic(self, clock: str, time_ns: int) -> int:
        """``time_ns`` of ``clock`` in CLOCK_MONOTONIC ns.

        A time that the clock did not show at one instant alone becomes one before everything:
        no lifetime has it.
        """
        since, until = self.window(clock, time_ns, time_ns)
        return since if since == until else _NEVER

    def from_monotonic(self, clock: str, time_ns: int) -> int:
        """What ``clock`` shows at ``time_ns`` of CLOCK_MONOTONIC, if it drifts evenly."""
        return time_ns if clock == MONOTONIC else self._known(clock).shown(time_ns)

    def _known(self, clock: str) -> _Readings:
        readings = self._read(clock)
        if readings is None:
            raise KsymError(
                f"the history cannot place times of the {clock} clock",
                "record with: perf record -k CLOCK_MONOTONIC",
            )
        return readings

    def _read(self, clock: str) -> _Readings | None:
        """The readings of a clock; None without any."""
        if clock not in self._readings:
            pairs = [(getattr(instant, clock), instant.monotonic) for instant in self._instants]
            pairs = [pair for pair in pairs if pair[0] is not None]
            self._readings[clock] = _Readings(pairs) if pairs else None
        return self._readings[clock]


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
    """Reads perf's clock beside the others, from one thread.

    It needs perf_event_paranoid at 2 or below. Where the kernel refuses, instants lack perf's
    time and ``problem`` says why.
    """

    def __init__(self) -> None:
        self._rings: list[Ring] = []
        self.problem = ""
        try:
            for flags, clockid in ((0, 0), (syscalls.USE_CLOCKID, time.CLOCK_MONOTONIC)):
                attr = syscalls.perf_event_attr(
                    flags=flags | _COMM_ALONE, clockid=clockid, sample_type=_SAMPLE_TIME
                )
                self._rings.append(Ring(syscalls.perf_event_open(attr, 0, -1), mmap.PAGESIZE))
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
        import ctypes

        # The name that the calling thread has is enough for a PERF_RECORD_COMM.
        with open("/proc/thread-self/comm", "rb") as file:
            name = file.read().rstrip(b"\n")
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
        perf, then = (_last_comm_time(ring) for ring in self._rings)
        return None if perf is None or then is None else (perf, then)

    def close(self) -> None:
        while self._rings:
            self._rings.pop().close()


def _last_comm_time(ring: Ring) -> int | None:
    """The stamp of the newest PERF_RECORD_COMM; empties the ring."""
    stamp = None
    data, _ = ring.drain()
    for kind, _, end in each_record(data):
        if kind == RECORD_COMM:
            # With PERF_SAMPLE_TIME alone the sample id is the time, at the record's end.
            (stamp,) = _WORD.unpack_from(data, end - _WORD.size)
    return stamp
