"""perf's samples and py-spy's, matched by thread and time; it is not one walk of a stack.

The k-th round in which py-spy stopped a thread gave that thread's k-th sample, and the log
has the time of each round. A sample of perf gets the Python frames of py-spy's samples before
and after it if those agree; else the callers that both have, and a frame that says so.

How often that is right is checked on the samples themselves: each is predicted from its
neighbours. Something short may still have lain between two that agree. So a leaf is given only
in a system call, or outside of any, in which that check has found it right.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.python import pyspy
from ksym_plugin.python.pyspy import AGAIN
from ksym_plugin.stacks.folded import Reader
from ksym_plugin.stacks.frames import Stacks
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ksym_plugin.python.pyspy import Hit, Log, Profile, Round, Stack, Thread
    from ksym_plugin.stacks import frames

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
#: A leaf is given in a system call if so many of those checked there are right; where a single
#: one is wrong, which tells little, LEAST_SHARE is enough.
_LEAST_SURE = 0.985
#: Where no leaf is given, a caller is given only if so many samples on each side have it.
_AROUND = 5
#: The function of a system call, as ``__x64_sys_read`` (include/linux/syscalls.h).
_SYSTEM_CALL = re.compile(r"(?:__\w+?_)?(?:compat_)?sys_\w+")

#: These stand for the Python frames that are not known.
UNCERTAIN = "[python frames uncertain]"
STACK_UNKNOWN = "[python stack unknown]"
NO_PYTHON = "[no python stack]"

#: What became of a sample of perf. It has a whole Python stack, or a part of one, or nothing is
#: known; or its thread has no Python.
MATCHED, PARTIAL, UNKNOWN = "matched", "uncertain", "unknown"
NATIVE = "of threads without Python"
OUTCOMES = (MATCHED, PARTIAL, UNKNOWN, NATIVE)
#: It was taken while py-spy had the thread stopped, and is left out.
STOPPED = "stopped"


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

    def line(self, rate: float | None) -> str:
        """A sentence on how fast py-spy was, of the ``rate`` it was asked for, and its cost."""
        asked = f" of {rate:g}" if rate else ""
        return (
            f"py-spy took {self.rate:.1f}{asked} samples a second,"
            f" and held the process {100 * self.pause:.1f} % of the time"
        )


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
    for tid, thread in profile.threads.items():
        processes.setdefault(thread.pid, {})[outer.get(tid, tid)] = thread
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
    last, mean = set(), 0.0
    if rounds:
        last = set(rounds[-1].tids)
        mean = (rounds[-1].at - rounds[0].at) / max(1, len(rounds) - 1)
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
    """Finds the frames of one thread's samples, with leaves as far as ``check`` allows.

    Without a check they are given wherever two samples agree.
    """

    def __init__(self, dated: Dated, check: Check | None) -> None:
        self._dated = dated
        self._check = check
        self._found: dict[tuple[int, int, bool], Found] = {}

    def at(self, hit: Hit) -> Found | None:
        """None before the first sample and after the last."""
        around = self._dated.around(hit.time)
        if around is None:
            return None
        key = (*around, self._check is None or self._check.is_sure(self._dated, around[0], hit))
        if key not in self._found:
            self._found[key] = self._between(*key)
        return self._found[key]

    def _between(self, before: int, after: int, is_sure: bool) -> Found:
        dated = self._dated
        stacks = dated.stacks[before : after + 1]
        shared = _common([stack.python for stack in stacks])
        agree = all(stack.python == shared for stack in stacks) and dated.is_near(before, after)
        if agree and is_sure:
            return Found(_with_native(stacks), True)
        if agree or not (self._check is None or self._check.passes):
            # What else ran may share no more than its neighbours do.
            around = dated.stacks[max(0, before - _AROUND) : after + _AROUND + 1]
            shared = _common([stack.python for stack in around])
            shortest = min(len(stack.python) for stack in around)
            shared = shared[: max(0, shortest - 1)]
        return Found(shared, False)


def _common(stacks: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The callers that all stacks have in common."""
    return tuple(
        frames[0] for frames in takewhile(lambda frames: len(set(frames)) == 1, zip(*stacks))
    )


def _with_native(stacks: Sequence[Stack]) -> tuple[str, ...]:
    """The frames of stacks with the same Python frames, with the native ones that all have."""
    parts = zip(*map(_segments, stacks))
    return tuple(frame for segments in parts for frame in _common(segments))


def _segments(stack: Stack) -> list[list[str]]:
    """The native frames before the first Python frame; then each of those, with what it called."""
    segments: list[list[str]] = [[]]
    for text, is_python in stack.frames:
        if is_python:
            segments.append([])
        segments[-1].append(text)
    return segments


@dataclass
class Check:
    """How many samples could be predicted from their neighbours, and how many were right.

    The same by the Python frames that were predicted, and the system call that perf saw just
    before the sample or after it.
    """

    checked: int = 0
    right: int = 0
    in_calls: Counter[tuple[tuple[str, ...], str | None]] = field(default_factory=Counter)
    right_in_calls: Counter[tuple[tuple[str, ...], str | None]] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.right / self.checked if self.checked else 0.0

    @property
    def passes(self) -> bool:
        return self.checked >= LEAST_CHECKED and self.share >= LEAST_SHARE

    def is_sure(self, dated: Dated, at: int, hit: Hit) -> bool:
        """Whether the Python frames of a sample were right in the system call of one of perf's."""
        key = (dated.stacks[at].python, _system_call(dated, hit))
        checked, right = self.in_calls[key], self.right_in_calls[key]
        least = LEAST_SHARE if checked - right == 1 else _LEAST_SURE
        return self.passes and right > 0 and right >= least * checked

    def add(self, dated: Dated, hits: Sequence[Hit]) -> None:
        """Check the samples of a thread, with perf's samples of it in the order of time.

        Only those with one of perf's on both sides count: the others are of a thread that
        waits, which is easy to predict, and for which no sample of perf needs frames.
        """
        hit_times = [hit.time for hit in hits]
        counts = [bisect_right(hit_times, time) for time in dated.times[: len(dated.stacks)]]
        for at in range(1, len(dated.stacks) - 1):
            if not counts[at - 1] < counts[at] < counts[at + 1]:
                continue
            before, after = dated.stacks[at - 1].python, dated.stacks[at + 1].python
            if before == after and dated.is_near(at - 1, at + 1):
                is_right = dated.stacks[at].python == before
                self.checked += 1
                self.right += is_right
                beside = hits[counts[at] - 1 : counts[at] + 1]
                for call in {_system_call(dated, hit) for hit in beside}:
                    self.in_calls[before, call] += 1
                    self.right_in_calls[before, call] += is_right

    def line(self, forced: bool) -> str:
        """A sentence on the result and what follows from it."""
        line = (
            f"self-check: {100 * self.share:.1f} % of {self.checked:,} samples are as their"
            " neighbours say"
        )
        if self.passes:
            return line
        line += f" ({100 * LEAST_SHARE:.0f} % of at least {LEAST_CHECKED} are wanted)"
        if forced:
            return f"{line}; leaves are given all the same and may be wrong"
        return f"{line}; Python leaves are withheld, --force shows them"


def _system_call(dated: Dated, hit: Hit) -> str | None:
    """The system call of a sample of perf, else the way into the kernel, else "".

    None for all where nobody knows beside which of py-spy's samples it lies.
    """
    if dated.slack:
        return None
    calls = (frame for frame in hit.kernel if _SYSTEM_CALL.match(frame))
    return next(calls, hit.kernel[0] if hit.kernel else "")


def by_thread(hits: Iterable[Hit]) -> dict[int, list[Hit]]:
    """perf's samples by thread, each thread's in the order of time."""
    threads: dict[int, list[Hit]] = {}
    for hit in sorted(hits, key=lambda hit: hit.time):
        threads.setdefault(hit.tid, []).append(hit)
    return threads


def check(threads: Mapping[int, Sequence[Hit]], dated: Mapping[int, Dated]) -> Check:
    """The self-check over all threads that both samplers saw."""
    verdict = Check()
    for tid, samples in dated.items():
        verdict.add(samples, [hit for hit in threads.get(tid, ()) if not hit.is_stopped])
    return verdict


class Grafted:
    """Samples with both sides: added up by stack, and by thread in the order of time."""

    def __init__(self) -> None:
        self._reader = Reader()
        self.stacks = Stacks(self._reader.table)
        #: By task and thread: stacks, and how many samples in a row had them.
        self.threads: dict[tuple[str, int], list[tuple[frames.Stack, float]]] = {}
        #: perf's samples by what became of them.
        self.outcomes: Counter[str] = Counter()

    def add(self, hit: Hit, outcome: str, *python: str) -> None:
        """Take in a sample with the Python frames that it gets, root first."""
        self.outcomes[outcome] += 1
        stack = tuple(map(self._reader.__getitem__, (hit.comm, *python, *hit.kernel)))
        self.stacks.add(stack)
        samples = self.threads.setdefault((hit.comm, hit.tid), [])
        count = samples.pop()[1] if samples and samples[-1][0] == stack else 0
        samples.append((stack, count + 1))

    def profiles(self) -> list[tuple[str, list[tuple[frames.Stack, float]]]]:
        """As ``speedscope.write`` takes them: all merged, then one a thread."""
        threads = [(f"{comm} {tid}", rows) for (comm, tid), rows in sorted(self.threads.items())]
        return [("all threads, merged", self.stacks.ordered()), *threads]

    def line(self) -> str:
        """A sentence on what became of perf's samples."""
        total = sum(self.outcomes[outcome] for outcome in OUTCOMES)
        shares = ", ".join(
            f"{100 * self.outcomes[outcome] / (total or 1):.1f} % {outcome}" for outcome in OUTCOMES
        )
        stopped = f"{self.outcomes[STOPPED]:,} left out, taken in stops"
        return f"{total:,} samples of perf: {shares}; {stopped}"


def graft(threads: Mapping[int, Sequence[Hit]], dating: Dating, check: Check | None) -> Grafted:
    """perf's samples by thread, with py-spy's frames; leaves as far as ``check`` allows.

    KsymError if no thread was seen by both.
    """
    grafted = Grafted()
    known = dating.threads.keys() | dating.misfits
    processes = {hits[0].pid for tid, hits in threads.items() if tid in known}
    if not processes:
        raise KsymError(
            "no thread was seen by both perf and py-spy",
            "record both at the same time: ksym pyspy record",
        )
    for tid, hits in threads.items():
        dated = dating.threads.get(tid)
        matcher = None if dated is None else Matcher(dated, check)
        # A thread of the process that py-spy never met has ended too soon.
        is_python = tid in known or (hits[0].pid in processes and tid not in dating.natives)
        for hit in hits:
            if hit.is_stopped:
                grafted.outcomes[STOPPED] += 1
            elif is_python:
                grafted.add(hit, *_answer(None if matcher is None else matcher.at(hit)))
            else:
                grafted.add(hit, NATIVE, NO_PYTHON)
    return grafted


def _answer(found: Found | None) -> tuple[str, ...]:
    """What becomes of a sample of a Python thread, and the Python frames that it gets."""
    if found is None:
        return UNKNOWN, STACK_UNKNOWN
    return (MATCHED, *found.frames) if found.is_whole else (PARTIAL, *found.frames, UNCERTAIN)
