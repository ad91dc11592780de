"""How results and messages are written."""

from __future__ import annotations

import json
import sys

import click

from ksym_plugin.cli.options import SECOND
from ksym_plugin.kernel.clocks import MONOTONIC, PERF, ClockMap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import IO, Any


#: Times are shown to the microsecond, as perf shows them: a narrower window goes unsaid.
_SHOWN = 1_000


class Failure(click.ClickException):
    """What cannot be done: one sentence on stderr, exit status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        say(self.message)


def say(sentence: str) -> None:
    """Tell the user something that is no result."""
    click.echo(f"ksym: {clean(sentence)}", err=True)


def clean(text: str) -> str:
    """``text`` on one line and without anything a terminal would obey.

    Names come from whoever loaded the program, and histories from whoever wrote them.
    """
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def write_lines(lines: Iterable[str]) -> None:
    """Write results, each on a line of its own and clean."""
    write = sys.stdout.write
    for line in lines:
        write(clean(line) + "\n")


def write_json(value: object) -> None:
    """Write a result for a program; addresses in it are ``hexadecimal`` strings."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def hexadecimal(address: int) -> str:
    return f"{address:#018x}"


def plural(number: int, noun: str) -> str:
    """``1 change``, ``2 changes``, ``2 losses``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


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
