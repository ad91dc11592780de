"""The times of py-spy's samples, and what ran between two of them.

The k-th round in which py-spy stopped a thread gave that thread's k-th sample, and the log
has the time of each round. Between two samples that agree, what ran is what both have;
between two that differ, only the callers they share are known. How often that is right is
checked on the samples themselves: each is predicted from its neighbours.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.python import pyspy
from ksym_plugin.python.pyspy import AGAIN
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ksym_plugin.python.pyspy import Log, Profile, Round, Stack, Thread

#: Neighbours further apart than so many mean intervals say nothing of the time between them.
FARTHEST = 4
#: Some rounds give no sample: py-spy is ended in one, or fails, or stops a thread that just
#: begins or ends. So many at the end are normal. Others may be anywhere, and with too many
#: of them no sample has a time.
_MOST_AT_END = 3
MOST_SLACK = 10
#: If threads that do not fit the log have more of the samples than this, log and samples
#: are not of one run.
_MOST_MISFIT = 0.5
#: The self-check passes with so many right of so many checked. Wherever this was measured
#: to pass, the leaves were right too.
LEAST_SHARE = 0.95
LEAST_CHECKED = 50
#: If it fails, a caller is given only if so many samples on each side have it.
_AROUND = 5


class Dated(NamedTuple):
    """The samples of one thread and when they were taken, in CLOCK_MONOTONIC ns.

    There are ``slack`` more times than samples, and which of them had none is not known:
    sample k was taken at one of ``times[k]`` to ``times[k + slack]``.
    """

    times: Sequence[int]
    stacks: Sequence[Stack]
    slack: int
    #: Mean ns between samples, of the whole process.
    mean: float

    def around(self, time: int) -> tuple[int, int] | None:
        """The last sample surely before a time and the first surely after; None at the ends."""
        after = bisect_right(self.times, time)
        before = after - 1 - self.slack
        if before < 0 or after >= len(self.stacks):
            return None
        return before, after

    def is_near(self, before: int, after: int) -> bool:
        last = min(after + self.slack, len(self.times) - 1)
        return self.times[last] - self.times[before] <= FARTHEST * self.mean


@dataclass
class Dating:
    """The threads that fit the log, by their ids as perf has them, and figures of the run."""

    threads: dict[int, Dated] = field(default_factory=dict)
    #: Threads with more samples than the log has rounds, or far fewer.
    misfits: set[int] = field(default_factory=set)
    #: Threads that py-spy stopped and found no Python in.
    natives: set[int] = field(default_factory=set)
    #: Samples a second that were reached, and the share of the time spent stopped.
    rate: float = 0.0
    pause: float = 0.0


def date(
    profile: Profile, log: Log, shift: int, outer: Mapping[int, int], has_idle: bool = False
) -> Dating:
    """The time of every sample.

    ``shift`` turns ns of UTC into CLOCK_MONOTONIC; ``outer`` turns ids of threads in a PID
    namespace into perf's and the log's; ``has_idle`` says that py-spy certainly ran with
    --idle. KsymError if log and samples do not fit.
    """
    has_idle = has_idle or log.settings.get("include_idle") == "true"
    processes: dict[int | None, dict[int, Thread]] = {}
    for thread in profile.threads.values():
        tid = outer.get(thread.tid, thread.tid)
        processes.setdefault(thread.pid, {})[tid] = thread
    dating = Dating()
    longest: list[Round] = []
    is_alone = len(processes) == 1
    for threads in processes.values():
        rounds = pyspy.rounds(log, None if is_alone else threads)
        rounds = rounds[pyspy.starting(log, rounds, is_alone) :]
        longest = max(longest, rounds, key=len)
        # A process that exits is still stopped when its interpreter is gone.
        most_lost = len(rounds) if log.exited and has_idle else _MOST_AT_END
        _date_process(dating, threads, rounds, shift, most_lost, log.errors)
    span = longest[-1].ended - longest[0].began if longest else 0
    if span > 0:
        dating.rate = len(longest) * 1e9 / span
        dating.pause = sum(round.ended - round.began for round in longest) / span
    # A misfit that is not in the log is there under an id of a namespace: it may be any thread.
    if dating.misfits <= log.tids:
        dating.natives = log.tids - dating.threads.keys() - dating.misfits
    _require_fit(dating, processes.values(), profile.version)
    return dating


def _date_process(
    dating: Dating,
    threads: Mapping[int, Thread],
    rounds: Sequence[Round],
    shift: int,
    most_lost: int,
    errors: int,
) -> None:
    """Date the samples of a process, of which py-spy lost up to ``most_lost`` at the end."""
    times: dict[int, list[int]] = {}
    for round in rounds:
        for tid in round.tids:
            times.setdefault(tid, []).append(round.at + shift)
    last = set(rounds[-1].tids) if rounds else set()
    mean = (rounds[-1].at - rounds[0].at) / max(1, len(rounds) - 1) if rounds else 0.0
    samples = {tid: _own(thread.samples) for tid, thread in threads.items()}
    extras = {tid: len(times.get(tid, ())) - len(stacks) for tid, stacks in samples.items()}
    # All threads that lived at the end lack the samples of the rounds that were cut off there.
    cut_off = min((extra for tid, extra in extras.items() if tid in last), default=0)
    cut_off = max(0, min(cut_off, most_lost) - errors)
    for tid, thread in threads.items():
        extra = extras[tid]
        slack = extra - cut_off if tid in last else extra
        if extra < 0 or slack > MOST_SLACK or not thread.in_order:
            dating.misfits.add(tid)
            continue
        kept = times.get(tid, [])[: len(samples[tid]) + slack]
        dating.threads[tid] = Dated(kept, samples[tid], slack, mean)


def _own(samples: Sequence[Stack]) -> list[Stack]:
    """The samples of a thread, without those of threads that it was about to start.

    Until a new thread runs, CPython has its creator's id for it, and no frames.
    """
    whole = [at for at, stack in enumerate(samples) if stack.frames]
    if not whole:
        return list(samples)
    first, last = whole[0], whole[-1]
    return [stack for at, stack in enumerate(samples) if stack.frames or not first < at < last]


def _require_fit(
    dating: Dating, processes: Iterable[Mapping[int, Thread]], spy_version: str
) -> None:
    counts = {tid: len(one.samples) for threads in processes for tid, one in threads.items()}
    misfit = sum(counts[tid] for tid in dating.misfits)
    if not misfit or misfit <= _MOST_MISFIT * sum(counts.values()):
        return
    version = f"py-spy {spy_version}" if spy_version else "this py-spy"
    tried = "" if spy_version in pyspy.TRIED else f" ({version} has not been tried)"
    raise KsymError(
        f"samples and log lines of py-spy differ in number{tried}: they are not of one run,"
        " or it was not told --idle, or was told --gil",
        AGAIN,
    )


class Found(NamedTuple):
    """The Python frames that are known of a time; with the leaf if ``is_whole``."""

    frames: tuple[str, ...]
    is_whole: bool


class Matcher:
    """Finds the frames of one thread at a time; if ``withheld``, never with the leaf."""

    def __init__(self, dated: Dated, withheld: bool) -> None:
        self._dated = dated
        self._withheld = withheld
        self._found: dict[tuple[int, int], Found] = {}

    def at(self, time: int) -> Found | None:
        """None before the first sample and after the last."""
        around = self._dated.around(time)
        if around is None:
            return None
        found = self._found.get(around)
        if found is None:
            found = self._found[around] = self._between(*around)
        return found

    def _between(self, before: int, after: int) -> Found:
        dated = self._dated
        if self._withheld:
            around = dated.stacks[max(0, before - _AROUND) : after + _AROUND + 1]
            shared = _common([stack.python for stack in around])
            shortest = min(len(stack.python) for stack in around)
            return Found(shared[: max(0, shortest - 1)], False)
        stacks = dated.stacks[before : after + 1]
        shared = _common([stack.python for stack in stacks])
        agree = all(stack.python == shared for stack in stacks)
        if agree and dated.is_near(before, after):
            return Found(_with_native(stacks), True)
        return Found(shared, False)


def _common(stacks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The callers that all stacks have in common."""
    return tuple(
        frames[0] for frames in takewhile(lambda frames: len(set(frames)) == 1, zip(*stacks))
    )


def _with_native(stacks: Sequence[Stack]) -> tuple[str, ...]:
    """The frames of stacks with the same Python frames, with the native ones that all have."""
    if all(stack is stacks[0] for stack in stacks):
        return tuple(text for text, _ in stacks[0].frames)
    parts = [_segments(stack) for stack in stacks]
    frames: list[str] = []
    for segments, python in zip_longest(zip(*parts), stacks[0].python):
        frames += _common(segments)
        if python is not None:
            frames.append(python)
    return tuple(frames)


def _segments(stack: Stack) -> list[tuple[str, ...]]:
    """The native frames before each Python frame, and after the last."""
    segments: list[list[str]] = [[]]
    for text, is_python in stack.frames:
        if is_python:
            segments.append([])
        else:
            segments[-1].append(text)
    return [tuple(segment) for segment in segments]


@dataclass
class Check:
    """How many samples could be predicted from their neighbours, and how many were right."""

    checked: int = 0
    right: int = 0

    @property
    def share(self) -> float:
        return self.right / self.checked if self.checked else 0.0

    @property
    def passes(self) -> bool:
        return self.checked >= LEAST_CHECKED and self.share >= LEAST_SHARE

    def add(self, dated: Dated, hits: Sequence[int]) -> None:
        """Check the samples of a thread, with the sorted times of perf's samples of it.

        Only those with one of perf's on both sides count: the others are of a thread that
        waits, which is easy to predict, and for which no sample of perf needs frames.
        """
        counts = [bisect_right(hits, time) for time in dated.times[: len(dated.stacks)]]
        for at in range(1, len(dated.stacks) - 1):
            if not counts[at - 1] < counts[at] < counts[at + 1]:
                continue
            before, after = dated.stacks[at - 1].python, dated.stacks[at + 1].python
            if before == after and dated.is_near(at - 1, at + 1):
                self.checked += 1
                self.right += dated.stacks[at].python == before
