"""perf's kernel stacks grafted onto py-spy's Python stacks.

This matches the samples of two samplers by thread and time; it is not one walk of a stack.
A sample of perf gets the Python frames of py-spy's samples before and after it if those
agree. If they differ, it gets the callers that both have, and a frame that says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksym_plugin.python.pyspy_match import LEAST_CHECKED, LEAST_SHARE, Check, Matcher
from ksym_plugin.stacks.folded import Reader
from ksym_plugin.stacks.frames import Stacks
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ksym_plugin.python.pyspy_match import Dated, Dating, Found
    from ksym_plugin.python.pyspy_perf import Hit
    from ksym_plugin.stacks.frames import Stack

#: These stand for the Python frames that are not known.
UNCERTAIN = "[python frames uncertain]"
STACK_UNKNOWN = "[python stack unknown]"
NO_PYTHON = "[no python stack]"


@dataclass
class Tally:
    """perf's samples by what became of them."""

    #: Whole Python stack; a part of it; nothing known; no Python thread.
    matched: int = 0
    uncertain: int = 0
    unknown: int = 0
    no_python: int = 0
    #: Taken while py-spy had the thread stopped, and left out.
    stopped: int = 0

    @property
    def samples(self) -> int:
        return self.matched + self.uncertain + self.unknown + self.no_python

    def line(self) -> str:
        total = self.samples or 1
        shares = ", ".join(
            f"{100 * count / total:.1f} % {word}"
            for count, word in (
                (self.matched, "matched"),
                (self.uncertain, "uncertain"),
                (self.unknown, "unknown"),
                (self.no_python, "of threads without Python"),
            )
        )
        stopped = f"{self.stopped:,} left out, taken in stops"
        return f"{self.samples:,} samples of perf: {shares}; {stopped}"


class Grafted:
    """Samples with both sides: added up by stack, and by thread in the order of time."""

    def __init__(self) -> None:
        self._reader = Reader()
        self.stacks = Stacks(self._reader.table)
        #: By task and thread: stacks, and how many samples in a row had them.
        self.threads: dict[tuple[str, int], list[tuple[Stack, float]]] = {}
        self.tally = Tally()

    def add(self, hit: Hit, *python: str) -> None:
        """Take in a sample with the Python frames that it gets, root first."""
        stack = tuple(map(self._reader.__getitem__, (hit.comm, *python, *hit.kernel)))
        self.stacks.add(stack)
        samples = self.threads.setdefault((hit.comm, hit.tid), [])
        count = samples.pop()[1] if samples and samples[-1][0] == stack else 0
        samples.append((stack, count + 1))

    def profiles(self) -> list[tuple[str, list[tuple[Stack, float]]]]:
        """As ``speedscope.write`` takes them: all merged, then one a thread."""
        threads = [(f"{comm} {tid}", rows) for (comm, tid), rows in sorted(self.threads.items())]
        return [("all threads, merged", self.stacks.ordered()), *threads]


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
        verdict.add(samples, [hit.time for hit in threads.get(tid, ()) if not hit.is_stopped])
    return verdict


def graft(threads: Mapping[int, Sequence[Hit]], dating: Dating, withheld: bool) -> Grafted:
    """perf's samples by thread, with py-spy's frames; without leaves if those are ``withheld``.

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
        matcher = None if dated is None else Matcher(dated, withheld)
        # A thread of the process that py-spy never met has ended too soon.
        is_python = tid in known or (hits[0].pid in processes and tid not in dating.natives)
        for hit in hits:
            if hit.is_stopped:
                grafted.tally.stopped += 1
            elif is_python:
                _graft_one(grafted, hit, None if matcher is None else matcher.at(hit.time))
            else:
                grafted.tally.no_python += 1
                grafted.add(hit, NO_PYTHON)
    return grafted


def _graft_one(grafted: Grafted, hit: Hit, found: Found | None) -> None:
    if found is None:
        grafted.tally.unknown += 1
        grafted.add(hit, STACK_UNKNOWN)
    elif found.is_whole:
        grafted.tally.matched += 1
        grafted.add(hit, *found.frames)
    else:
        grafted.tally.uncertain += 1
        grafted.add(hit, *found.frames, UNCERTAIN)


def verdict_line(verdict: Check, forced: bool) -> str:
    """A sentence on the result of the self-check and what follows from it."""
    line = (
        f"self-check: {100 * verdict.share:.1f} % of {verdict.checked:,} samples are as their"
        " neighbours say"
    )
    if verdict.passes:
        return line
    line += f" ({100 * LEAST_SHARE:.0f} % of at least {LEAST_CHECKED} are wanted)"
    if forced:
        return f"{line}; leaves are given all the same and may be wrong"
    return f"{line}; Python leaves are withheld, --force shows them"


def run_line(dating: Dating, rate: float | None) -> str:
    """A sentence on how fast py-spy was, of the ``rate`` it was asked for, and what it cost."""
    asked = f" of {rate:g}" if rate else ""
    return (
        f"py-spy took {dating.rate:.1f}{asked} samples a second,"
        f" and held the process {100 * dating.pause:.1f} % of the time"
    )
