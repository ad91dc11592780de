"""Options that several commands have, and how what people type is read."""

from __future__ import annotations

import re
from typing import Callable, TypeVar

import click

from ksym_plugin.history.locate import Choice
from ksym_plugin.kernel.clocks import CLOCKS
from ksym_plugin.stacks.frames import WEIGHTS

Command = TypeVar("Command", bound=Callable[..., object])

SECOND = 1_000_000_000
_SECONDS = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,9}))?:?", re.ASCII)
#: In ns, 146 years: SQLite's integers hold twice that.
_LATEST = 1 << 62
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", re.ASCII)
_SPAN_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_LEAST_HISTORY = 1 << 20
#: From a page to the greatest power of two of pages whose bytes all kernels can count.
_RING_SIZES = range(1 << 12, (1 << 30) + 1)


def _parsed(pattern: re.Pattern[str], text: str, kind: str) -> re.Match[str]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no {kind}")
    return match


def point(text: str) -> int:
    """A point in time as perf script prints it, such as ``5741.328403``: ns."""
    match = _parsed(_SECONDS, text, "time in seconds, such as 5741.328403")
    time_ns = int(match[1]) * SECOND + int((match[2] or "").ljust(9, "0"))
    if time_ns > _LATEST:
        raise click.BadParameter(f"{text!r} is further on than any clock goes")
    return time_ns


def span(text: str) -> int:
    """A length of time in seconds, or with the unit s, m, h or d: ns."""
    match = _parsed(_SPAN, text, "length of time, such as 90, 1.5h or 7d")
    return int(float(match[1]) * _SPAN_UNITS[match[2]] * SECOND)


def size(text: str) -> int:
    """Bytes, or with the unit K, M, G or T (powers of 1024)."""
    match = _parsed(_SIZE, text, "size, such as 500M or 2G")
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def history_size(text: str) -> int:
    """The greatest size of a history. An empty one takes 1M: what is less lacks its unit."""
    number = size(text)
    if number < _LEAST_HISTORY:
        raise click.BadParameter(f"{text!r} is no size for a history: from 1M on")
    return number


def ring_size(text: str) -> int:
    """The size of a ring buffer, such as a kernel may have room for."""
    number = size(text)
    if number not in _RING_SIZES:
        raise click.BadParameter(f"{text!r} is no size for a ring: from 4K to 1G")
    return number


def glob(pattern: str) -> str:
    """A pattern for fnmatch from a part of a name, or from a whole one with ``*`` and ``?``."""
    return pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"


def history(command: Command) -> Command:
    """``--history`` and ``--boot``: a ``locate.Choice`` as ``history``."""
    file = click.option(
        "-H",
        "--history",
        metavar="FILE",
        callback=lambda context, _, path: Choice(path, context.params.pop("boot")),
        help="The history; else $KSYM_HISTORY, ksym.db here, or the system's.",
    )
    boot = click.option(
        "--boot",
        metavar="BOOT",
        is_eager=True,  # It comes before the file, with which it makes one value.
        help="The boot in it, by number or id, where data does not tell which it is from.",
    )
    return file(boot(command))


at = click.option(
    "--at",
    type=point,
    metavar="TIME",
    help="A time as perf script prints it, such as 5741.328403.",
)
clock = click.option(
    "--clock",
    type=click.Choice(CLOCKS),
    help="The clock that times are on.  [default: perf]",
)
text_clock = click.option(
    "--clock",
    type=click.Choice(CLOCKS),
    help="The clock of the times.  [default: as the header or history tells]",
)
perf_data = click.option(
    "-i", "--input", "data", metavar="FILE", help="What perf recorded.  [default: perf.data]"
)
output = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write to, whole or not at all.  [default: stdout]",
)
samples_clock = click.option(
    "--clock",
    type=click.Choice(CLOCKS),
    help="The clock of the samples, whatever perf.data tells of it.",
)
event = click.option(
    "--event",
    metavar="EVENT",
    help="Count the samples of this event.  [default: the one that has most]",
)


def weight(default: str | None) -> Callable[[Command], Command]:
    """What is counted of each sample."""
    return click.option(
        "--weight",
        type=click.Choice(WEIGHTS),
        default=default,
        show_default=True,
        help="Count samples, or add up their periods.",
    )


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
vmlinux = click.option(
    "--vmlinux", metavar="FILE", help="Name kernel functions from this vmlinux or .debug file."
)
kernel_lines = click.option(
    "--lines",
    "with_lines",
    is_flag=True,
    help="Source lines of the kernel too, by DWARF; needs --vmlinux or $DEBUGINFOD_URLS.",
)
