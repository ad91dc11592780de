"""Clocks: placing times between readings, perf_event_attr, and perf's own clock."""

from __future__ import annotations

import mmap
import os
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel import clocks, syscalls
from ksym_plugin.kernel.clocks import (
    BOOTTIME,
    MONOTONIC,
    PERF,
    REALTIME,
    ClockMap,
    Instant,
    PerfClock,
    clock_of_attr,
)
from ksym_plugin.kernel.perf_ring import Ring
from ksym_plugin.timeline.errors import KsymError

#: The fields of struct perf_event_attr up to clockid, from include/uapi/linux/perf_event.h.
ATTR = "II" + "QQQQ" + "Q" + "II" + "QQQQ" + "Ii"


def attr_of(flags: int, clockid: int, order: str = "=") -> bytes:
    return (
        struct.pack(order + ATTR, 1, 112, 9, 0, 0, 0, flags, 0, 0, 0, 0, 0, 0, 0, clockid)
        + b"\0" * 16
    )


@pytest.mark.parametrize(
    ("clockid", "clock"), [(0, REALTIME), (1, MONOTONIC), (7, BOOTTIME), (4, None), (11, None)]
)
def test_clock_of_an_event(clockid: int, clock: str | None) -> None:
    assert clock_of_attr(attr_of(1 << 25 | 1 << 18, clockid)) == clock
    assert clock_of_attr(attr_of(1 << 18, clockid)) == PERF


def test_clock_of_an_attr_that_is_cut_short() -> None:
    assert clock_of_attr(b"") == PERF
    assert clock_of_attr(attr_of(0, 1)[:64]) == PERF
    assert clock_of_attr(attr_of(1 << 25, 1)[:64]) is None  # it says there is one


def test_clock_of_an_event_where_bytes_are_big_endian() -> None:
    bits = "".join("1" if bit == 25 else "0" for bit in range(64))  # declared order is from the top
    assert clock_of_attr(attr_of(int(bits, 2), 1, ">"), "big") == MONOTONIC
    assert clock_of_attr(attr_of(1 << 25, 1, ">"), "big") == PERF


def map_of(*pairs: tuple[int, int | None]) -> ClockMap:
    """A map from (monotonic, perf) readings."""
    return ClockMap(Instant(ours, ours, ours, perf) for ours, perf in pairs)


def test_between_readings_the_drift_is_even_and_beyond_them_there_is_none() -> None:
    table = map_of((1000, 900), (3000, 2500))
    assert table.to_monotonic(PERF, 900) == 1000
    assert table.to_monotonic(PERF, 1700) == 2000
    assert table.to_monotonic(PERF, 2500) == 3000
    assert table.to_monotonic(PERF, 0) == 100
    assert table.to_monotonic(PERF, 10_000) == 10_500
    assert table.to_monotonic(MONOTONIC, 5) == 5


def test_clock_that_was_never_read_is_an_error_with_a_remedy() -> None:
    for table in (ClockMap([]), map_of((1000, None))):
        assert not table.knows(PERF)
        assert table.knows(MONOTONIC)
        with pytest.raises(KsymError, match="-k CLOCK_MONOTONIC"):
            table.to_monotonic(PERF, 5)
    assert map_of((1000, None)).to_monotonic(BOOTTIME, 1005) == 1005


READINGS = st.lists(
    st.tuples(st.integers(1, 10**10), st.integers(-(10**6) + 1, 10**6 - 1)),
    min_size=1,
    max_size=8,
)


@given(READINGS, st.lists(st.integers(-(10**9), 10**11), min_size=2, max_size=10))
@settings(max_examples=100)
def test_places_are_monotone_exact_at_readings_and_between_neighbours(
    steps: list[tuple[int, int]], times: list[int]
) -> None:
    ours, theirs, readings = 0, 0, []
    for our_step, drift in steps:
        ours, theirs = ours + our_step, theirs + max(1, our_step + drift)
        readings.append((ours, theirs))
    table = map_of(*readings[::-1])
    for our_time, their_time in readings:
        assert table.to_monotonic(PERF, their_time) == our_time
    placed = [table.to_monotonic(PERF, at) for at in sorted(times)]
    assert placed == sorted(placed)
    for at, place in zip(sorted(times), placed):
        for our_time, their_time in readings:
            assert (place >= our_time) if at >= their_time else (place <= our_time)


SECOND = 10**9


def real_clock(*readings: tuple[int, int]) -> ClockMap:
    """A map of CLOCK_REALTIME from readings of both clocks in seconds."""
    return ClockMap(Instant(at * SECOND, at * SECOND, real * SECOND, None) for at, real in readings)


def test_times_between_which_a_clock_was_set_forward_are_a_window() -> None:
    forward = real_clock((10, 110), (20, 120), (30, 131))
    assert forward.window(REALTIME, 115 * SECOND, 115 * SECOND) == (15 * SECOND, 15 * SECOND)
    # If it was set at once, it showed 124 at 24; if it was set before that, at 23.
    assert forward.window(REALTIME, 124 * SECOND, 124 * SECOND) == (23 * SECOND, 24 * SECOND)
    assert forward.to_monotonic(REALTIME, 124 * SECOND) < 0
    assert forward.to_monotonic(REALTIME, 132 * SECOND) == 31 * SECOND


def test_times_that_a_clock_showed_twice_are_a_window_of_both() -> None:
    back = real_clock((10, 110), (20, 120), (30, 115), (40, 125))
    assert back.window(REALTIME, 112 * SECOND, 113 * SECOND) == (12 * SECOND, 28 * SECOND)
    assert back.window(REALTIME, 121 * SECOND, 121 * SECOND) == (21 * SECOND, 36 * SECOND)
    assert back.to_monotonic(REALTIME, 112 * SECOND) < 0
    assert back.to_monotonic(REALTIME, 131 * SECOND) == 46 * SECOND


def test_two_readings_at_one_instant_are_one_place() -> None:
    twice = real_clock((10, 110), (10, 150))
    assert twice.window(REALTIME, 130 * SECOND, 130 * SECOND) == (10 * SECOND, 10 * SECOND)


def test_a_time_is_placed_as_fast_where_a_clock_was_set_back_far() -> None:
    """As on a machine that began in a year to come: each later time is one from before, too."""
    year = 365 * 86_400
    count = 20_000
    readings = ((10 * at, 10 * at + (year if at < 2 else 0)) for at in range(count))
    table = real_clock(*readings)
    began = time.process_time()
    for at in range(10 * count - 2_000, 10 * count):
        _, until = table.window(REALTIME, at * SECOND, at * SECOND)
        assert until == at * SECOND
    assert time.process_time() - began < 1


def test_before_its_boot_a_clock_showed_nothing() -> None:
    """It was set back by more than the boot was old."""
    back = real_clock((10, 1000), (20, 110))
    assert back.window(REALTIME, 105 * SECOND, 105 * SECOND) == (10 * SECOND, 15 * SECOND)
    assert back.window(REALTIME, 995 * SECOND, 995 * SECOND) == (5 * SECOND, 905 * SECOND)
    assert back.to_monotonic(REALTIME, 50 * SECOND) < 0


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(-30, 30), st.integers(0, 100)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 140),
)
@settings(max_examples=300)
def test_a_window_holds_when_a_clock_showed_a_time_that_was_set_once_between_readings(
    steps: list[tuple[int, int, int]], at: int
) -> None:
    """The clock is simulated: an offset to ours that changes at one instant of each step."""
    now, offset, readings, changes = 10, 100, [(10, 110)], []
    for length, change, where in steps:
        changes.append((now + length * where / 100, offset))
        now, offset = now + length, offset + change
        readings.append((now, now + offset))
    changes.append((float("inf"), offset))
    ahead = next(ahead for until, ahead in changes if at < until)
    since, until = real_clock(*readings).window(
        REALTIME, (at + ahead) * SECOND, (at + ahead) * SECOND
    )
    assert since <= at * SECOND <= until


@given(READINGS, st.integers(-(10**9), 10**11))
@settings(max_examples=100)
def test_a_time_of_ours_is_shown_as_the_time_that_is_placed_there(
    steps: list[tuple[int, int]], at: int
) -> None:
    ours, theirs, readings = 0, 0, []
    for our_step, drift in steps:
        ours, theirs = ours + our_step + 10**7, theirs + our_step + 10**7 + drift
        readings.append((ours, theirs))
    table = map_of(*readings)
    assert abs(table.to_monotonic(PERF, table.from_monotonic(PERF, at)) - at) <= 2


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.one_of(st.just(0), st.integers(-40, 40))),
        min_size=1,
        max_size=6,
    ),
    st.integers(-50, 150),
    st.integers(-20, 200),
)
@settings(max_examples=500)
def test_all_that_a_clock_shows_up_to_a_bound_has_one_place_before_it(
    steps: list[tuple[int, int]], shown: int, until: int
) -> None:
    """Readings are some ms apart, so clocks drift, are set and stand still."""
    ours, theirs, readings = 10, 10, [(10, 10)]
    for length, change in steps:
        ours, theirs = ours + length, theirs + length + change
        readings.append((ours, theirs))
    unit = 100_000  # Ten of them are less than a step that counts as one.
    table = map_of(*((at * unit, perf * unit) for at, perf in readings))
    last = table.last_before(PERF, until * unit, shown * unit)
    assert last >= shown * unit
    for at in {*range(shown * unit + 1, last, max(1, (last - shown * unit) // 9)), last}:
        since, place = table.window(PERF, at, at)
        if at > shown * unit:
            assert since == place <= until * unit
    assert table.last_before(MONOTONIC, until, shown) == max(until, shown)


def test_a_bound_is_as_far_as_it_can_be() -> None:
    table = map_of((1000, 900), (3_001_000, 3_000_900), (6_001_000, 6_000_950))
    assert table.last_before(PERF, 2000, 950) == 1900
    assert table.last_before(PERF, 10**9, 950) == 3_000_899  # Another drift begins behind it.
    assert table.last_before(PERF, 10**9, 6_000_951) == 10**9 - 50
    assert table.last_before(PERF, 900, 950) == 950


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def perf_clock() -> PerfClock:
    clock = PerfClock()
    if clock.problem:
        pytest.skip(clock.problem)
    return clock


def stamp_of_a_sample() -> tuple[int, int, int]:
    """perf's clock by another way: the stamp of a sample of this thread's own work.

    Gives CLOCK_MONOTONIC when there was no sample yet, a sample's stamp by perf's
    clock, and CLOCK_MONOTONIC when it was there.
    """
    attr = syscalls.perf_event_attr(
        type=syscalls.TYPE_SOFTWARE,
        config=1,  # PERF_COUNT_SW_TASK_CLOCK
        flags=syscalls.EXCLUDE_KERNEL | syscalls.EXCLUDE_HV,
        sample_type=1 << 2,  # PERF_SAMPLE_TIME
        sample_period=1_000_000,
    )
    fd = syscalls.perf_event_open(attr, 0, -1)
    ring = mmap.mmap(fd, 2 * mmap.PAGESIZE)
    try:
        head = 0
        before = time.monotonic_ns()
        give_up = before + 2_000_000_000
        while not head and time.monotonic_ns() < give_up:
            before_check = time.monotonic_ns()
            (head,) = struct.unpack_from("=Q", ring, 1024)
            if not head:
                before = before_check
        after = time.monotonic_ns()
        if not head:
            pytest.skip("this kernel writes no task-clock samples here")
        kind, _, size = struct.unpack_from("=IHH", ring, mmap.PAGESIZE)
        assert (kind, size) == (9, 16)  # PERF_RECORD_SAMPLE
        (stamp,) = struct.unpack_from("=Q", ring, mmap.PAGESIZE + 8)
        return before, stamp, after
    finally:
        ring.close()
        os.close(fd)


def test_perfs_clock_agrees_with_a_samples_stamp(perf_clock: PerfClock) -> None:
    try:
        readings = [perf_clock.read()]
        before, stamp, after = stamp_of_a_sample()
        readings.append(perf_clock.read())
    finally:
        perf_clock.close()
    assert None not in [reading.perf for reading in readings]
    place = ClockMap(readings).to_monotonic(PERF, stamp)
    assert before - 20_000 <= place <= after + 20_000


def test_readings_of_one_instant_agree(perf_clock: PerfClock) -> None:
    try:
        for _ in range(20):
            before = time.monotonic_ns()
            boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before
            instant = perf_clock.read()
            after = time.monotonic_ns()
            assert before <= instant.monotonic <= after
            assert abs(instant.boottime - instant.monotonic - boot) < 50_000_000
            assert abs(instant.realtime - time.time_ns()) < 5_000_000_000
    finally:
        perf_clock.close()


def test_many_readings_do_not_fill_the_ring(perf_clock: PerfClock) -> None:
    try:
        stamps = [perf_clock.read().perf or 0 for _ in range(300)]
    finally:
        perf_clock.close()
    assert stamps == sorted(set(stamps))
    assert stamps[0] > 0


def test_name_of_the_thread_stays_what_it_was(perf_clock: PerfClock) -> None:
    with open("/proc/thread-self/comm", "rb") as file:
        name = file.read()
    perf_clock.read()
    perf_clock.close()
    with open("/proc/thread-self/comm", "rb") as file:
        assert file.read() == name


def test_nothing_stays_open(perf_clock: PerfClock) -> None:
    perf_clock.close()
    before = open_files()
    clock = PerfClock()
    assert len(open_files()) > len(before)
    clock.read()
    clock.close()
    clock.close()
    assert open_files() == before
    assert clock.read().perf is None


@pytest.mark.parametrize("failing", ["first", "second", "mapping"])
def test_failure_leaves_nothing_open_and_is_said(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def perf_event_open(*_: object) -> int:
        if failing == "first" or (failing == "second" and opened):
            raise PermissionError(13, "Permission denied")
        opened.append(os.memfd_create("event"))
        os.truncate(opened[-1], 0 if failing == "mapping" else 2 * mmap.PAGESIZE)
        return opened[-1]

    monkeypatch.setattr(syscalls, "perf_event_open", perf_event_open)
    before = open_files()
    if failing == "mapping":
        monkeypatch.setattr(mmap, "mmap", refuse)
    clock = PerfClock()
    assert open_files() == before
    assert "perf's clock cannot be read" in clock.problem
    instant = clock.read()
    assert instant.perf is None
    assert abs(instant.monotonic - time.monotonic_ns()) < 10_000_000_000


def refuse(*_: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_record_that_runs_over_the_rings_end_is_read_whole() -> None:
    """A ring written by hand: the last COMM straddles the end of the data page."""
    page = mmap.PAGESIZE
    fd = os.memfd_create("event")
    os.truncate(fd, 2 * page)
    records = [(3, 111), (1, 222), (3, 333), (3, 444)]  # COMM, MMAP, COMM, COMM
    at = tail = 10 * page - 3 * 40 - 12
    for kind, stamp in records:
        data = struct.pack("=IHH", kind, 0, 40) + b"\0" * 24 + struct.pack("=Q", stamp)
        for number, byte in enumerate(data):
            os.pwrite(fd, bytes((byte,)), page + (at + number) % page)
        at += 40
    os.pwrite(fd, struct.pack("=QQ", at, tail), 1024)
    ring = Ring(fd, page)
    assert clocks._last_comm_time(ring) == 444
    assert clocks._last_comm_time(ring) is None
    ring.close()
