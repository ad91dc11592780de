"""What py-spy says of itself under ``RUST_LOG=py_spy=info,remoteprocess=debug``.

Unless it is told ``--nonblocking`` it stops all threads for each sample, and logs when::

    [2026-11-30T02:40:46.372274092Z DEBUG remoteprocess::linux] attached to thread 4711
    [2026-11-30T02:40:46.372531011Z DEBUG remoteprocess::linux] detached from thread 4711

These lines are py-spy's own affair, the same from 0.3.14 to 0.4.3. So nothing is believed
that does not fit the samples in number.
"""

from __future__ import annotations

import calendar
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Final

#: Those the log of which has been seen to be like this.
TRIED: Final = ("0.3.14", "0.4.0", "0.4.1", "0.4.3")

_LINE: Final = re.compile(
    rb"\[(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)\.(\d{1,9})Z +\S+ +\S+\] (.*)", re.DOTALL
)
_LOCK: Final = re.compile(rb"(attached to|detached from) thread (\d{1,10})\s*\Z")
_SETTING: Final = re.compile(rb"\s+([a-z_]+): (\S+),\s*\Z")
_PYTHON: Final = re.compile(rb"python version (\d+)\.(\d+)")
_ERRORS: Final = re.compile(rb"Samples: (\d{1,18}) Errors: (\d{1,18})")
#: Said for each sample that failed, and the total at the end, which goes to stdout.
_FAILED: Final = b"Failed to get stack trace from"
_EXITED: Final = b"Stopped sampling because process exited"
_NAMES: Final = b"looking up thread names"
_CONFIG: Final = b"config Config {"
_MAPS: Final = b"Got virtual memory maps"
_SECOND: Final = 1_000_000_000


class Round:
    """One sample of a process: when its threads were stopped and let go, in ns of UTC.

    ``at`` is when the last one stood, which is when stacks begin to be read.
    """

    __slots__ = ("at", "began", "ended", "tids")

    def __init__(self, began: int) -> None:
        self.began = self.at = self.ended = began
        self.tids: list[int] = []


class Log:
    """What a log holds; times are ns of UTC."""

    __slots__ = (
        "configured",
        "errors",
        "exited",
        "locks",
        "mapped",
        "named",
        "python",
        "samples",
        "settings",
    )

    def __init__(self) -> None:
        #: When, which thread, and whether it was stopped (else let go), in order.
        self.locks: list[tuple[int, int, bool]] = []
        #: When names of threads were looked up: in a process's first round, and for new ones.
        self.named: list[int] = []
        #: When py-spy began, and when it had found the process: about its zero of time.
        self.configured: int | None = None
        self.mapped: int | None = None
        #: How many samples failed.
        self.errors = 0
        #: Whether it ended because the process did.
        self.exited = False
        #: How many stacks were written, of all threads.
        self.samples: int | None = None
        self.python: tuple[int, int] | None = None
        #: py-spy's options as it prints them, as ``gil_only`` = ``false``; not all tell.
        self.settings: dict[str, str] = {}

    @property
    def tids(self) -> set[int]:
        return {tid for _, tid, _ in self.locks}


def parse(lines: Iterable[bytes]) -> Log:
    """What the log's lines say; whatever else is among them is passed over."""
    log = Log()
    for line in lines:
        found = _LINE.match(line)
        if found is not None:
            _note(log, _time(found), found[8])
            continue
        setting = _SETTING.match(line)
        if setting is not None:
            log.settings[setting[1].decode()] = setting[2].decode("ascii", "replace")
        log.exited = log.exited or _EXITED in line
        errors = _ERRORS.search(line)
        if errors is not None:
            log.samples, log.errors = int(errors[1]), max(log.errors, int(errors[2]))
    return log


def _time(found: re.Match[bytes]) -> int:
    *parts, fraction = (found[number] for number in range(1, 8))
    seconds = calendar.timegm((*map(int, parts), 0, 0, 0))
    return seconds * _SECOND + int(fraction.ljust(9, b"0"))


def _note(log: Log, time: int, message: bytes) -> None:
    lock = _LOCK.match(message)
    if lock is not None:
        log.locks.append((time, int(lock[2]), lock[1] == b"attached to"))
    elif message.startswith(_NAMES):
        log.named.append(time)
    elif message.startswith(_FAILED):
        log.errors += 1
    elif message.startswith(_CONFIG) and log.configured is None:
        log.configured = time
    elif message.startswith(_MAPS) and log.mapped is None:
        log.mapped = time
    else:
        python = _PYTHON.match(message)
        if python is not None:
            log.python = int(python[1]), int(python[2])


def rounds(log: Log, tids: Collection[int] | None = None) -> list[Round]:
    """The rounds of the process that has these threads; None: of the only one.

    py-spy stops all threads, reads them, lets all go. Several processes are read at the
    same time, so each is looked at alone.
    """
    found: list[Round] = []
    is_over = True
    for time, tid, is_stop in log.locks:
        if tids is not None and tid not in tids:
            continue
        if not is_stop:
            if found:
                found[-1].ended = time
            is_over = True
            continue
        if is_over:
            found.append(Round(time))
            is_over = False
        found[-1].at = found[-1].ended = time
        found[-1].tids.append(tid)
    return found


def starting(log: Log, found: list[Round], is_alone: bool) -> int:
    """How many of a process's first rounds gave no sample: py-spy's first look at it.

    In the last of them it first looks up the names of threads; where it reads several
    processes, nothing tells whose.
    """
    if not is_alone or not log.named:
        return min(1, len(found))
    return max(1, sum(round.began <= log.named[0] for round in found)) if found else 0
