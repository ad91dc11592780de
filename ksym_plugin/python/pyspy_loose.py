"""py-spy without stopping the process: its chrometrace file, and where it lies in time.

Without stops nothing dates the samples. The file has times, but only of changes, and on a
clock that began when py-spy did, within some milliseconds. What a thread does in the
kernel depends on the Python function it is in: so the beginning is taken to be where the
two sides tell most of each other. That also makes up for a change being seen late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter

from ksym_plugin.python.pyspy import AGAIN, Stack, spelled, thread_of
from ksym_plugin.python.pyspy_match import Found, common
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Final

    from ksym_plugin.python.pyspy_log import Log
    from ksym_plugin.python.pyspy_perf import Hit

_MICROSECOND: Final = 1000
_MILLISECOND: Final = 1_000_000
#: How far around the lines of py-spy's log between which it began that is looked for, in
#: ns, and how finely; a change is seen up to two intervals late too.
_AROUND: Final = 5 * _MILLISECOND
_STEP: Final = _MILLISECOND // 2
#: What is taken of perf's samples for that.
_MOST_HITS: Final = 3000
#: Nothing is told of so many intervals before a change and after one.
_BEFORE: Final = 3
_AFTER: Final = 1


class Changes:
    """The stacks of one thread by the time of py-spy's clock (ns) from which each held."""

    __slots__ = ("stacks", "times")

    def __init__(self) -> None:
        self.times: list[int] = []
        self.stacks: list[Stack] = []

    def add(self, time: int, stack: Stack) -> None:
        if self.times and time < self.times[-1]:
            raise ValueError(time)
        if self.times and self.times[-1] == time:
            self.stacks[-1] = stack
        else:
            self.times.append(time)
            self.stacks.append(stack)


def parse(document: object) -> dict[int, Changes]:
    """The changes of each thread in a chrometrace file. KsymError if it cannot be used."""
    try:
        return _read(document)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError):
        raise KsymError("this is no chrometrace file of py-spy's", AGAIN) from None


def _read(document: Any) -> dict[int, Changes]:  # noqa: ANN401 - JSON of any shape
    threads: dict[int, Changes] = {}
    open_frames: dict[object, list[tuple[str, str]]] = {}
    owners: dict[object, int] = {}
    if len({event["pid"] for event in document}) > 1:
        raise KsymError(
            "py-spy mixes several processes up in a chrometrace file",
            "record without --subprocesses",
        )
    for event in document:
        key, name = event["tid"], str(event["name"])
        frames = open_frames.setdefault(key, [])
        if event["ph"] == "B":
            frames.append((name, str(event["args"]["filename"] or "")))
        elif event["ph"] != "E" or frames.pop()[0] != name:
            raise ValueError(event)
        owner = thread_of(name)
        if owner is not None:
            if owner.is_pthread:
                raise KsymError(
                    "py-spy has only pthread ids of the threads, which perf does not know",
                    "record without --nonblocking, or with Python 3.11 or later",
                )
            owners[key] = owner.tid
        tid = owners[key]
        stack = Stack(tuple((spelled(*frame), True) for frame in frames[1:]))
        threads.setdefault(tid, Changes()).add(round(event["ts"] * _MICROSECOND), stack)
    return threads


def beginning(
    threads: Mapping[int, Changes],
    hits: Mapping[int, Sequence[Hit]],
    log: Log,
    shift: int,
    interval: float,
) -> int:
    """CLOCK_MONOTONIC at py-spy's zero of time, less how late it sees changes.

    ``shift`` turns ns of UTC into CLOCK_MONOTONIC; ``interval`` is that between samples.
    """
    began = log.configured or log.mapped
    if began is None:
        raise KsymError(
            "py-spy's log does not tell when it began",
            "record with RUST_LOG=py_spy=info, and give what it said as --pyspy-log",
        )
    pairs = [
        (changes, hit.time, _call(hit.kernel))
        for tid, changes in threads.items()
        for hit in hits.get(tid, ())
        if not hit.is_held
    ]
    pairs = pairs[:: max(1, len(pairs) // _MOST_HITS)]
    first = began + shift - _AROUND - round(2 * interval)
    last = (log.mapped or began) + shift + _AROUND
    return max(range(first, last, _STEP), key=lambda zero: _told(pairs, zero))


def _call(kernel: tuple[str, ...]) -> str:
    """The system call that a kernel stack is of."""
    return next((frame for frame in kernel if "sys_" in frame), "")


def _told(pairs: Sequence[tuple[Changes, int, str]], zero: int) -> float:
    """The mutual information of Python stacks and system calls, in nats."""
    both: Counter[tuple[object, str]] = Counter()
    stacks: Counter[object] = Counter()
    calls: Counter[str] = Counter()
    for changes, time, call in pairs:
        at = bisect_right(changes.times, time - zero) - 1
        stack = changes.stacks[at].python if at >= 0 else None
        both[stack, call] += 1
        stacks[stack] += 1
        calls[call] += 1
    total = len(pairs)
    return sum(
        count / total * math.log(count * total / (stacks[stack] * calls[call]))
        for (stack, call), count in both.items()
    )


class LooseMatcher:
    """Answers for the instants of one thread, from what it changed to and when."""

    def __init__(self, changes: Changes, zero: int, interval: float) -> None:
        self._changes = changes
        self._zero = zero
        self._interval = interval

    def at(self, time: int) -> Found | None:
        """None before the first stack and after the last."""
        changes, time = self._changes, time - self._zero
        after = bisect_right(changes.times, time)
        if after == 0 or after == len(changes.times):
            return None
        stack = changes.stacks[after - 1].python
        if changes.times[after] - time <= _BEFORE * self._interval:
            return Found(common([stack, changes.stacks[after].python]), False)
        if time - changes.times[after - 1] <= _AFTER * self._interval and after > 1:
            return Found(common([changes.stacks[after - 2].python, stack]), False)
        return Found(stack, True)
