"""Event sources: where changes of BPF symbols come from.

``open_source`` starts the best one that this kernel and this user's rights allow.
"""

from __future__ import annotations

from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ksym_plugin.timeline.tracker import Source

AUTO = "auto"


class Attempt:
    """A source that did not start: why, and what to do about it."""

    __slots__ = ("name", "problem", "remedy")

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        self.name = name
        self.problem = problem
        self.remedy = remedy


def _kprobe(ring_bytes: int | None) -> Source:
    from ksym_plugin.sources.kprobe import KprobeSource

    return KprobeSource(ring_bytes)


def _fentry(ring_bytes: int | None) -> Source:
    from ksym_plugin.sources.fentry import FentrySource

    return FentrySource(ring_bytes)


def _perf_event(_: int | None) -> Source:
    from ksym_plugin.sources.perf_event import PerfEventSource

    return PerfEventSource()


def _polling(_: int | None) -> Source:
    from ksym_plugin.sources.polling import PollingSource

    return PollingSource()


#: Name and constructor, the best first: this is the order in which ``auto`` tries them.
_SOURCES: tuple[tuple[str, Callable[[int | None], Source]], ...] = (
    ("kprobe", _kprobe),
    ("fentry", _fentry),
    ("perf_event", _perf_event),
    ("polling", _polling),
)


def names() -> list[str]:
    """The sources there are, the best first."""
    return [name for name, _ in _SOURCES]


def open_source(name: str = AUTO, ring_bytes: int | None = None) -> tuple[Source, list[Attempt]]:
    """The source called ``name``, or the first that starts; and those that did not.

    ``ring_bytes`` is the room for records that nobody has read yet, where a source has such
    a ring (its size is in ``stats``); None is for its default.
    The source is started and belongs to the caller. SourceError, naming every source
    tried with its reason, when none starts.
    """
    attempts: list[Attempt] = []
    for known, construct in _SOURCES:
        if name not in (AUTO, known):
            continue
        try:
            return construct(ring_bytes), attempts
        except SourceError as error:
            attempts.append(Attempt(known, error.problem, error.remedy))
    if not attempts:
        raise SourceError(
            f"there is no event source called {name}", f"use {', '.join([AUTO, *names()])}"
        )
    raise _none_started(attempts)


def _none_started(attempts: list[Attempt]) -> SourceError:
    if len(attempts) == 1:
        return SourceError(f"{attempts[0].name}: {attempts[0].problem}", attempts[0].remedy)
    problems = ", ".join(f"{attempt.name}: {attempt.problem}" for attempt in attempts)
    remedies = dict.fromkeys(attempt.remedy for attempt in attempts if attempt.remedy)
    return SourceError(f"no event source can start ({problems})", "; or ".join(remedies))
