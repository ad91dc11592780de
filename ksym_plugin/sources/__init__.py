"""Event sources: where changes of BPF symbols come from.

``open_source`` starts the best one that this kernel and this user's rights allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksym_plugin.timeline.errors import SourceError

if TYPE_CHECKING:
    from ksym_plugin.timeline.tracker import Source

AUTO = "auto"
#: The best first: this is the order in which ``auto`` tries them.
NAMES = ("kprobe", "fentry", "perf_event", "polling")


def open_source(
    name: str = AUTO, ring_bytes: int | None = None
) -> tuple[Source, list[tuple[str, SourceError]]]:
    """The source called ``name``, or the first that starts; and those that did not, and why.

    ``ring_bytes`` is the room for records that nobody has read yet, where a source has such a ring
    (its size is in ``stats``); None is for its default. The source is started and belongs to the
    caller. SourceError, naming every source tried with its reason, when none starts.
    """
    if name not in (AUTO, *NAMES):
        raise SourceError(
            f"there is no event source called {name}", f"use {', '.join([AUTO, *NAMES])}"
        )
    refusals: list[tuple[str, SourceError]] = []
    for known in NAMES if name == AUTO else (name,):
        try:
            return _start(known, ring_bytes), refusals
        except SourceError as error:
            refusals.append((known, error))
    text = ", ".join(f"{known}: {error.problem}" for known, error in refusals)
    remedies = dict.fromkeys(error.remedy for _, error in refusals if error.remedy)
    problem = text if len(refusals) == 1 else f"no event source can start ({text})"
    raise SourceError(problem, "; or ".join(remedies))


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
