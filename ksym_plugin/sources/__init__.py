"""Event sources: where changes of BPF symbols come from.

``open_source`` starts the best one that this kernel and this user's rights allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.timeline.errors import SourceError

if TYPE_CHECKING:
    from ksym_plugin.timeline.tracker import Source

AUTO = "auto"
#: The best first: this is the order in which ``auto`` tries them.
NAMES = ("kprobe", "fentry", "perf_event", "polling")


class Attempt(NamedTuple):
    """A source that did not start: why, and what to do about it."""

    name: str
    problem: str
    remedy: str


def open_source(name: str = AUTO, ring_bytes: int | None = None) -> tuple[Source, list[Attempt]]:
    """The source called ``name``, or the first that starts; and those that did not.

    ``ring_bytes`` is the room for records that nobody has read yet, where a source has such
    a ring (its size is in ``stats``); None is for its default.
    The source is started and belongs to the caller. SourceError, naming every source
    tried with its reason, when none starts.
    """
    attempts: list[Attempt] = []
    for known in NAMES:
        if name not in (AUTO, known):
            continue
        try:
            return _start(known, ring_bytes), attempts
        except SourceError as error:
            attempts.append(Attempt(known, error.problem, error.remedy))
    if not attempts:
        raise SourceError(
            f"there is no event source called {name}", f"use {', '.join([AUTO, *NAMES])}"
        )
    raise _none_started(attempts)


def _start(name: str, ring_bytes: int | None) -> Source:
    """The source of that name, started. Only its own modules are imported."""
    if name in ("kprobe", "fentry"):
        from ksym_plugin.sources.probe import FentrySource, KprobeSource

        return (KprobeSource if name == "kprobe" else FentrySource)(ring_bytes)
    if name == "perf_event":
        from ksym_plugin.sources.perf_event import PerfEventSource

        return PerfEventSource()
    from ksym_plugin.sources.polling import PollingSource

    return PollingSource()


def _none_started(attempts: list[Attempt]) -> SourceError:
    if len(attempts) == 1:
        return SourceError(f"{attempts[0].name}: {attempts[0].problem}", attempts[0].remedy)
    problems = ", ".join(f"{attempt.name}: {attempt.problem}" for attempt in attempts)
    remedies = dict.fromkeys(attempt.remedy for attempt in attempts if attempt.remedy)
    return SourceError(f"no event source can start ({problems})", "; or ".join(remedies))
