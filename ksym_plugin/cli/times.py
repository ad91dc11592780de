"""Times as people write and read them: seconds with decimals, on a clock of their choice."""

from __future__ import annotations

import re

import click

from ksym_plugin.kernel.clocks import MONOTONIC, PERF, ClockMap

SECOND = 1_000_000_000
_SECONDS = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,9}))?:?", re.ASCII)
#: What 63 bits of nanoseconds hold, some centuries of which no clock needs.
_LATEST = 1 << 62
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", re.ASCII)
_SPAN_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_HISTORY_LEAST = 1 << 20
#: A page, and the greatest power of two of pages whose bytes all kernels can count.
_RING_LEAST = 1 << 12
_RING_MOST = 1 << 30
#: Times are shown to the microsecond, as perf shows them: a narrower window goes unsaid.
_SHOWN = 1_000


def point(text: str) -> int:
    """A point in time as perf script prints it, such as ``5741.328403``: ns."""
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time in seconds, such as 5741.328403")
    time_ns = int(match[1]) * SECOND + int((match[2] or "").ljust(9, "0"))
    if time_ns > _LATEST:
        raise click.BadParameter(f"{text!r} is further on than any clock goes")
    return time_ns


def span(text: str) -> int:
    """A length of time in seconds, or with the unit s, m, h or d: ns."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no length of time, such as 90, 1.5h or 7d")
    return int(float(match[1]) * _SPAN_UNITS[match[2]] * SECOND)


def size(text: str) -> int:
    """Bytes, or with the unit K, M, G or T (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size, such as 500M or 2G")
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def history_size(text: str) -> int:
    """A bound for a history; less than an empty one takes must be a unit forgotten."""
    number = size(text)
    if number < _HISTORY_LEAST:
        raise click.BadParameter(f"{text!r} is no size for a history: from 1M on")
    return number


def ring_size(text: str) -> int:
    """The size of a ring: some that a kernel may have room for."""
    number = size(text)
    if not _RING_LEAST <= number <= _RING_MOST:
        raise click.BadParameter(f"{text!r} is no size for a ring: from 4K to 1G")
    return number


class Dial:
    """Shows CLOCK_MONOTONIC times on the clock that the user reads.

    Where perf's clock is only the default and was never read, the times shown are
    CLOCK_MONOTONIC's: ``clock`` says which.
    """

    def __init__(self, clocks: ClockMap, clock: str | None) -> None:
        if clock is None:
            clock = PERF if clocks.knows(PERF) else MONOTONIC
        self.clock = clock
        self._clocks = clocks
        clocks.to_monotonic(clock, 0)

    def of(self, time_ns: int) -> int:
        """A CLOCK_MONOTONIC time on this clock, in ns."""
        there = time_ns
        for _ in range(3):
            # Both clocks tick at all but the same rate, so each round leaves a
            # millionth of the error of the one before.
            there += time_ns - self._clocks.to_monotonic(self.clock, there)
        return there

    def text(self, time_ns: int) -> str:
        there = self.of(time_ns)
        return f"{there // SECOND}.{there % SECOND // 1000:06d}"

    def window(self, earliest: int | None, latest: int | None) -> str:
        """When something happened: by ``latest``, and how much before that at the most."""
        if earliest is None or latest is None:
            return "-"
        if earliest <= 0:
            return f"before {self.text(latest)}"
        width = latest - earliest
        return self.text(latest) + (f" (-{length(width)})" if width >= _SHOWN else "")


def length(ns: int) -> str:
    """A length of time in the unit that suits it."""
    for unit, name in ((SECOND, "s"), (1_000_000, "ms"), (1_000, "µs")):
        if ns >= unit:
            return f"{ns / unit:.3g} {name}" if ns < 1000 * unit else f"{ns // unit} {name}"
    return f"{ns} ns"
