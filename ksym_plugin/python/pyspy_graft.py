"""perf's kernel stacks grafted onto py-spy's Python stacks.

This is matching of two samplers by thread and instant, not one walk of a stack. Where
py-spy's samples before and after one of perf's agree, it gets their frames. Where they do
not, what they share, and a frame that says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ksym_plugin.python.pyspy_match import LEAST_CHECKED, LEAST_SHARE, Check, Matcher
from ksym_plugin.stacks.folded import Reader
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ksym_plugin.python.pyspy_match import Dated, Dating, Found
    from ksym_plugin.python.pyspy_perf import Hit
    from ksym_plugin.stacks.frames import FrameTable, Stack

#: What stands for the Python frames that are not known.
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
    #: Taken while py-spy held the thread, and left out.
    held: int = 0

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
        return f"{self.samples:,} samples of perf: {shares}; {self.held:,} left out, taken in stops"


@dataclass
class Grafted:
    """Samples with both sides: added up by stack, and by thread in the order of time."""

    counts: Counter[str] = field(default_factory=Counter)
    #: By task and thread: stacks, and how many samples in a row had them.
    threads: dict[tuple[str, int], list[tuple[str, float]]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def add(self, hit: Hit, python: tuple[str, ...]) -> None:
        stack = ";".join((hit.comm, *python, *hit.kernel))
        self.counts[stack] += 1
        samples = self.threads.setdefault((hit.comm, hit.tid), [])
        before, count = samples.pop() if samples and samples[-1][0] == stack else (stack, 0)
        samples.append((before, count + 1))

    def profiles(self) -> tuple[FrameTable, list[tuple[str, list[tuple[Stack, float]]]]]:
        """As ``speedscope.write`` takes them: all merged, then one a thread."""
        reader = Reader()
        threads = [(f"{comm} {tid}", [*rows]) for (comm, tid), rows in sorted(self.threads.items())]
        merged: list[tuple[str, float]] = [*sorted(self.counts.items())]
        return reader.table, [
            (title, [(reader.stack(text), count) for text, count in rows])
            for title, rows in [("all threads, merged", merged), *threads]
        ]

    def folded(self) -> Iterable[str]:
        return (f"{stack} {count}\n" for stack, count in sorted(self.counts.items()))


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
        hits = [hit.time for hit in threads.get(tid, ()) if not hit.is_held]
        if hits:
            verdict.add(samples, hits)
    return verdict


def matchers(dating: Dating, withheld: bool) -> dict[int, Matcher]:
    """What answers for each thread that fits the log."""
    return {tid: Matcher(dated, withheld) for tid, dated in dating.threads.items()}


def graft(
    threads: Mapping[int, Sequence[Hit]],
    answers: Mapping[int, Matcher],
    misfits: Iterable[int],
    natives: Iterable[int],
) -> Grafted:
    """Both sides together.

    ``answers`` are of the Python threads, ``misfits`` Python threads without, ``natives``
    threads that py-spy stopped and found no Python in. KsymError if no thread was seen by
    both.
    """
    grafted = Grafted()
    lost = set(misfits)
    without = set(natives)
    processes = {hits[0].pid for tid, hits in threads.items() if tid in answers or tid in lost}
    if not processes:
        raise KsymError(
            "no thread was seen by both perf and py-spy",
            "record both at the same time: ksym pyspy record",
        )
    for tid, hits in threads.items():
        mine = answers.get(tid)
        # A thread of the process that py-spy never met was gone too soon.
        is_python = tid in lost or (hits[0].pid in processes and tid not in without)
        for hit in hits:
            if hit.is_held:
                grafted.tally.held += 1
            elif mine is not None:
                _graft_one(grafted, hit, mine.at(hit.time))
            elif is_python:
                _graft_one(grafted, hit, None)
            else:
                grafted.tally.no_python += 1
                grafted.add(hit, (NO_PYTHON,))
    return grafted


def _graft_one(grafted: Grafted, hit: Hit, found: Found | None) -> None:
    if found is None:
        grafted.tally.unknown += 1
        grafted.add(hit, (STACK_UNKNOWN,))
    elif found.is_whole:
        grafted.tally.matched += 1
        grafted.add(hit, found.frames)
    else:
        grafted.tally.uncertain += 1
        grafted.add(hit, (*found.frames, UNCERTAIN))


def verdict_line(verdict: Check, forced: bool) -> str:
    """The self-check in words, and what follows from it."""
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


def run_line(dating: Dating, asked: float | None) -> str:
    """What py-spy reached, and what it cost."""
    of = f" of {asked:g}" if asked else ""
    return (
        f"py-spy took {dating.rate:.1f}{of} samples a second,"
        f" and held the process {100 * dating.pause:.1f} % of the time"
    )
