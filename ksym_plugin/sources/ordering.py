"""In what order the changes of one drain happened.

Each CPU's ring is in order; between rings nothing says who was first, and a program is
often loaded on one CPU and unloaded on another. What can be told at one address: loads
and unloads take turns there, an unload belongs to one load, and programs get ascending
ids. A later change at one start also gets a later ``latest``, by a nanosecond each, so
that the order survives in the times.
"""

from __future__ import annotations

from ksym_plugin.kernel.perf_ring import KSYMBOL_BPF
from ksym_plugin.timeline.symbols import BPF_PROG, UNNAMED_BPF, bpf_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.kernel.perf_ring import KSymbol

    Live = dict[int, tuple[str, "int | None"]]


class Event:
    """A load or unload while it is being worked out.

    ``there`` says whether the program was seen in the kernel after the drain (True), was
    gone by then (False), or was not to be told (None). ``rank`` counts how many changes
    at the same start came after this one.
    """

    __slots__ = (
        "at",
        "doubtful",
        "earliest",
        "latest",
        "length",
        "name",
        "prog_id",
        "rank",
        "reported",
        "ring",
        "start",
        "there",
        "type",
        "unload",
    )

    def __init__(self, record: KSymbol, ring: int, at: int, earliest: int) -> None:
        self.start = record.start
        self.length = record.length
        self.name = record.name
        self.type = record.type
        self.unload = record.unregister
        self.ring = ring
        self.at = at
        self.earliest = earliest
        self.latest = 0
        self.prog_id: int | None = None
        self.there: bool | None = None
        #: One of several that a BPF_EVENT may have been about.
        self.doubtful = False
        self.rank = 0
        #: The name it was reported under, once it was.
        self.reported = ""

    def awaits_program(self) -> bool:
        """Whether this is a program's load whose BPF_EVENT has not been seen."""
        if self.unload or self.prog_id is not None or self.type != KSYMBOL_BPF:
            return False
        return bpf_kind(self.name) == BPF_PROG


def in_order(events: list[Event], live: Live) -> list[Event]:
    """Rank the events and sort them; ``live`` is brought up to date."""
    by_start: dict[int, list[Event]] = {}
    for event in events:
        by_start.setdefault(event.start, []).append(event)
    for start, found in by_start.items():
        group = found
        if len(group) > 1:
            group = _sequence(found, live.get(start))
            earliest = 0
            for at, event in enumerate(group):
                event.rank = len(group) - 1 - at
                earliest = event.earliest = max(event.earliest, earliest)
        last = group[-1]
        if not last.unload:
            live[start] = (last.name or UNNAMED_BPF, last.prog_id)
        elif start in live and (len(group) > 1 or agree(last, *live[start])):
            del live[start]
    return sorted(events, key=lambda event: (-event.rank, not event.unload))


def agree(event: Event, name: str, prog_id: int | None) -> bool:
    """Whether ``event`` can be about the symbol of this name and program id."""
    if event.prog_id is not None and prog_id is not None:
        return event.prog_id == prog_id
    return not event.name or name in ("", event.name) or UNNAMED_BPF in (name, event.name)


def _sequence(group: list[Event], before: tuple[str, int | None] | None) -> list[Event]:
    """The events at one start in the order they happened."""
    loads = [event for event in group if not event.unload]
    ends: dict[int, Event] = {}
    leading: list[Event] = []
    for unload in (event for event in group if event.unload):
        load = _load_of(unload, [load for load in loads if load.at not in ends])
        if before is not None and _ends(unload, before, load, loads):
            before = None
            leading.append(unload)
        elif load is not None:
            ends[load.at] = unload
        else:
            leading.append(unload)
    if all(load.prog_id is not None for load in loads):
        # Ids ascend and go round once in 2^31 programs, which is then one drain wrong.
        loads.sort(key=lambda load: load.prog_id or 0)
    # One that is still there took the place last.
    loads.sort(key=lambda load: load.at not in ends)
    ordered = leading
    for load in loads:
        ordered.append(load)
        if load.at in ends:
            ordered.append(ends[load.at])
    return ordered


def _load_of(unload: Event, loads: list[Event]) -> Event | None:
    """The load in the same drain that an unload can be the end of."""
    fitting = [
        load
        for load in loads
        if not load.there
        and not (load.ring == unload.ring and load.at > unload.at)
        and agree(unload, load.name, load.prog_id)
    ]
    for load in fitting:
        if load.prog_id is not None and load.prog_id == unload.prog_id:
            return load
    return fitting[0] if fitting else None


def _ends(
    unload: Event, before: tuple[str, int | None], load: Event | None, loads: list[Event]
) -> bool:
    """Whether an unload is the end of what was there before, rather than of ``load``."""
    name, prog_id = before
    if not agree(unload, name, prog_id):
        return False
    if load is None or (prog_id is not None and prog_id == unload.prog_id):
        return not any(prog_id is not None and load.prog_id == prog_id for load in loads)
    return load.prog_id is None or load.prog_id not in (unload.prog_id, prog_id)
