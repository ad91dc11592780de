"""perf's kernel stacks grafted onto py-spy's Python stacks.

This is matching of two samplers by thread and instant, not one walk of a stack. Where
py-spy's samples before and after one of perf's agree, it gets their frames. Where they do
not, what they share, and a frame that says so.
"""

from __future__ import annotations

from ksym_plugin.python.pyspy_match import LEAST_CHECKED, LEAST_SHARE, Check, Matcher
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Final, Protocol

    from ksym_plugin.python.pyspy_match import Dated, Dating, Found
    from ksym_plugin.python.pyspy_perf import Hit

    class Answers(Protocol):
        """The Python side of one thread by the instant; None where nothing is known."""

        def at(self, time: int, /) -> Found | None: ...


#: What stands for the Python frames that are not known.
UNCERTAIN: Final = "[python frames uncertain]"
STACK_UNKNOWN: Final = "[python stack unknown]"
NO_PYTHON: Final = "[no python stack]"


class Tally:
    """perf's samples by what became of them."""

    __slots__ = ("held", "matched", "no_python", "uncertain", "unknown")

    def __init__(self) -> None:
        #: Whole Python stack; a part of it; nothing known; no Python thread.
        self.matched = 0
        self.uncertain = 0
        self.unknown = 0
        self.no_python = 0
        #: Taken while py-spy held the thread, and left out.
        self.held = 0

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


class Grafted:
    """Samples with both sides: by thread in the order of time, and added up by stack."""

    __slots__ = ("counts", "tally", "threads")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        #: By task and thread: stacks, and how many samples in a row had them.
        self.threads: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self.tally = Tally()

    def add(self, hit: Hit, python: tuple[str, ...]) -> None:
        stack = ";".join((hit.comm, *python, *hit.kernel))
        self.counts[stack] = self.counts.get(stack, 0) + 1
        samples = self.threads.setdefault((hit.comm, hit.tid), [])
        if samples and samples[-1][0] == stack:
            samples[-1] = (stack, samples[-1][1] + 1)
        else:
            samples.append((stack, 1))

    def profiles(self) -> list[tuple[str, list[tuple[str, float]]]]:
        """As ``speedscope.write`` takes them: all merged, then one a thread."""
        merged: list[tuple[str, float]] = [*sorted(self.counts.items())]
        threads: list[tuple[str, list[tuple[str, float]]]] = [
            (f"{comm} {tid}", [*samples]) for (comm, tid), samples in sorted(self.threads.items())
        ]
        return [("all threads, merged", merged), *threads]

    def folded(self) -> Iterable[str]:
        return (f"{stack} {count}\n" for stack, count in sorted(self.counts.items()))


def by_thread(hits: Iterable[Hit]) -> dict[int, list[Hit]]:
    """perf's samples by thread, each thread's in the order of time."""
    threads: dict[int, list[Hit]] = {}
    for hit in hits:
        threads.setdefault(hit.tid, []).append(hit)
    for mine in threads.values():
        mine.sort(key=_time)
    return threads


def _time(hit: Hit) -> int:
    return hit.time


def check(threads: Mapping[int, Sequence[Hit]], dated: Mapping[int, Dated]) -> Check:
    """The self-check over all threads that both samplers saw."""
    verdict = Check()
    for tid, samples in dated.items():
        hits = [hit.time for hit in threads.get(tid, ()) if not hit.is_held]
        if hits:
            verdict.add(samples, hits)
    return verdict


def matchers(dating: Dating, withheld: bool) -> dict[int, Answers]:
    """What answers for each thread that fits the log."""
    return {tid: Matcher(dated, withheld) for tid, dated in dating.threads.items()}


def graft(
    threads: Mapping[int, Sequence[Hit]],
    answers: Mapping[int, Answers],
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
    said = (
        f"self-check: {100 * verdict.share:.1f} % of {verdict.checked:,} samples are as their"
        " neighbours say"
    )
    if verdict.passes:
        return said
    wanted = f"{said} ({100 * LEAST_SHARE:.0f} % of at least {LEAST_CHECKED} are wanted)"
    if forced:
        return f"{wanted}; leaves are given all the same and may be wrong"
    return f"{wanted}; Python leaves are withheld, --force shows them"


def run_line(dating: Dating, asked: float | None) -> str:
    """What py-spy reached, and what it cost."""
    of = f" of {asked:g}" if asked else ""
    return (
        f"py-spy took {dating.rate:.1f}{of} samples a second,"
        f" and held the process {100 * dating.pause:.1f} % of the time"
    )
