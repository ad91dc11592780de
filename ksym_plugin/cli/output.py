"""How results and messages are written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

import click

from ksym_plugin.cli.options import SECOND
from ksym_plugin.kernel.clocks import MONOTONIC, PERF, ClockMap
from ksym_plugin.stacks.names import printable

#: Times are shown to the microsecond, as perf shows them. A narrower window is not shown.
_RESOLUTION = 1_000


def say(*sentences: str) -> None:
    """Print messages on stderr: what the user should know and is no result."""
    for sentence in sentences:
        click.echo(f"ksym: {printable(sentence)}", err=True)


def write_lines(lines: Iterable[str]) -> None:
    """Write results, each on a line of its own and clean."""
    sys.stdout.writelines(printable(line) + "\n" for line in lines)


def write_pieces(pieces: Iterable[bytes], result: IO[bytes]) -> None:
    """Write each piece at once: whoever reads may be waiting for it."""
    for piece in pieces:
        result.write(piece)
        result.flush()


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
    """Shows CLOCK_MONOTONIC times on another clock, ``clock``.

    By default that is perf's, or CLOCK_MONOTONIC itself if perf's clock was never read.
    """

    def __init__(self, clocks: ClockMap, clock: str | None) -> None:
        if clock is None:
            clock = PERF if clocks.knows(PERF) else MONOTONIC
        self.clock = clock
        self._clocks = clocks
        self.of(0)

    def of(self, time_ns: int) -> int:
        """A CLOCK_MONOTONIC time on this clock, in ns."""
        return self._clocks.from_monotonic(self.clock, time_ns)

    def text(self, time_ns: int) -> str:
        shown = self.of(time_ns)
        return f"{shown // SECOND}.{shown % SECOND // 1000:06d}"

    def window(self, earliest: int | None, latest: int | None) -> str:
        """When something happened: by ``latest``, and how much before that at the most."""
        if earliest is None or latest is None:
            return "-"
        if earliest <= 0:
            return f"before {self.text(latest)}"
        width = latest - earliest
        return self.text(latest) + (f" (-{length(width)})" if width >= _RESOLUTION else "")


def length(ns: int) -> str:
    """A length of time in the unit that suits it."""
    for unit, name in ((SECOND, "s"), (1_000_000, "ms"), (1_000, "µs")):
        if ns >= unit:
            return f"{ns / unit:.3g} {name}" if ns < 1000 * unit else f"{ns // unit} {name}"
    return f"{ns} ns"


def check_result(path: str | None) -> None:
    """OSError if a result cannot be written there; asked before there is one.

    None and an empty path are results that are not wanted.
    """
    if path and path != "-" and not _is_special(path):
        fd, begun = _begin(path)
        os.close(fd)
        os.unlink(begun)


@contextlib.contextmanager
def open_result(path: str | None) -> Iterator[IO[bytes]]:
    """Where a result goes: stdout, or a file that is there whole or not at all.

    What is no regular file (a pipe, /dev/null) is written as it is. click's atomic files
    would not do: they are put in place also after an error.
    """
    if path is None or path == "-":
        yield sys.stdout.buffer
        return
    if _is_special(path):
        with open(path, "wb") as file:
            yield file
        return
    target = os.path.realpath(path)
    fd, begun = _begin(path)
    try:
        with open(fd, "wb") as file:
            yield file
        with _naming(path):  # A file that is a mount cannot be replaced.
            os.chmod(begun, _mode_of(target))
            os.replace(begun, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(begun)
        raise


def write_text(pieces: Iterable[str], path: str | None) -> None:
    """Write a result as UTF-8, whatever the terminal's encoding is; bytes of names as they were."""
    with open_result(path) as target:
        target.writelines(piece.encode("utf-8", "surrogateescape") for piece in pieces)


def _is_special(path: str) -> bool:
    """Whether it is a pipe or a device, which nothing can take the place of."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _begin(path: str) -> tuple[int, str]:
    """A new file beside the one that it is to replace: its descriptor and its path."""
    target = os.path.realpath(path)
    with _naming(path):
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return tempfile.mkstemp(prefix=".ksym-", dir=os.path.dirname(target))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors name the file that was asked for."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _mode_of(path: str) -> int:
    """The mode of the file that is replaced, or that of a new one."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
