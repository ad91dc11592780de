"""From the records of one drain to changes: which program, which name.

The kernel announces a program as one KSYMBOL for each of its functions, the main one
first, and then a BPF_EVENT with its id and the main function's tag
(perf_event_bpf_event() in kernel/bpf). Between two of them the task can be preempted by
another one that loads, or move to another CPU and so to another ring. So nothing is
taken from the order alone: what bpf(2) says of a program that is still there decides,
and failing that a tag that only one record fits.
"""

from __future__ import annotations

from collections import deque

from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.kernel.perf_ring import (
    KSYMBOL_BPF,
    KSYMBOL_OOL,
    PROG_LOAD,
    PROG_UNLOAD,
    BpfEvent,
    KSymbol,
)
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    OOL,
    UNNAMED_BPF,
    Load,
    Symbol,
    Unload,
    bpf_kind,
    split_bpf_name,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.kernel.perf_ring import KSymbol

    Live = dict[int, tuple[str, "int | None"]]
    from collections.abc import Iterable

    from ksym_plugin.kernel.bpf_prog import ProgramInfo
    from ksym_plugin.kernel.perf_ring import Record

    #: (start, program id) to the name it was loaded under in the drain at hand.
    Here = dict[tuple[int, int], str]


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


#: The granule of an image's length in a record, whatever its true length is.
_IMAGE_LENGTH = 4096
#: How far back a BPF_EVENT may lie behind its KSYMBOLs: twice the functions a program
#: can have (BPF_MAX_SUBPROGS), and a bound on the work that records can make.
_MOST_PENDING = 512
#: Modules that kallsyms gives to out-of-line code (kernel/kallsyms.c).
_OOL_MODULES = {
    "ftrace_trampoline": "__builtin__ftrace",
    "kprobe_insn_page": "__builtin__kprobes",
    "kprobe_optinsn_page": "__builtin__kprobes",
}


class Sideband:
    """Turns records into changes; remembers what is live to tell whose end an end is."""

    def __init__(self, reader: ProgramReader | None = None) -> None:
        self._reader = reader or ProgramReader()
        #: Start to (name, program id) of what is there.
        self.live: dict[int, tuple[str, int | None]] = {}
        self._waiting: list[Event] = []

    def know(self, loads: Iterable[Load]) -> None:
        """Take in a snapshot."""
        for load in loads:
            self.live[load.symbol.start] = (load.symbol.name, load.prog_id)

    def changes(
        self, rings: Iterable[list[Record]], earliest: int, latest: int
    ) -> list[Load | Unload]:
        """The changes of one drain: each ring's records, and the window they fall in.

        They come by ``latest``, at one start in the order they happened, and of those
        with the same ``latest`` unloads first. A load that could only now be given to
        its program comes a second time, with the id.
        """
        events: list[Event] = []
        lanes = [_lane(records, ring, earliest, events) for ring, records in enumerate(rings)]
        strays: list[ProgramInfo] = []
        for lane in lanes:
            self._claim_loads(lane, strays)
        again = self._claim_strays(strays, events) if strays else []
        here: Here = {
            (event.start, event.prog_id): event.name
            for event in events
            if not event.unload and event.prog_id is not None
        }
        for lane in lanes:
            self._claim_unloads(lane, here)
        self._waiting = [event for event in events if event.awaits_program()]
        return again + [_change(event, latest) for event in in_order(events, self.live)]

    def _claim_loads(self, lane: list[Event | BpfEvent], strays: list[ProgramInfo]) -> None:
        """Give the loads that a BPF_EVENT follows to its program."""
        pending: deque[Event] = deque(maxlen=_MOST_PENDING)
        for item in lane:
            if isinstance(item, Event):
                if not item.unload:
                    pending.append(item)
            elif item.type == PROG_LOAD:
                program, there = self._look_up(item)
                if program is None:
                    _claim_by_tag(item, pending, there)
                    continue
                wanted = {start: at for at, (start, _) in enumerate(program.functions)}
                self._give(program, wanted, reversed(pending))
                if wanted:
                    # The task moved while it announced the program: look elsewhere.
                    strays.append(program)

    def _look_up(self, record: BpfEvent) -> tuple[ProgramInfo | None, bool | None]:
        """The program, if bpf(2) tells where it is; and whether it is there, if known."""
        try:
            program = self._reader.program(record.id)
        except SourceError:
            return None, None
        if program is None or program.tag != record.tag:
            return None, False
        return (program if program.functions else None), True

    def _claim_strays(self, programs: list[ProgramInfo], events: list[Event]) -> list[Load]:
        """Find programs' loads in all rings, and among those reported without an id."""
        for program in programs:
            wanted = {start: at for at, (start, _) in enumerate(program.functions)}
            self._give(program, wanted, reversed(events))
            self._give(program, wanted, reversed(self._waiting))
        late = [event for event in self._waiting if event.prog_id is not None]
        for event in late:
            if self.live.get(event.start) == (event.reported or UNNAMED_BPF, None):
                self.live[event.start] = (event.name, event.prog_id)
        return [_load(event, event.latest) for event in late]

    def _give(self, program: ProgramInfo, wanted: dict[int, int], events: Iterable[Event]) -> None:
        """Give events, the latest first, to the functions of a program that is there."""
        for event in events:
            at = wanted.get(event.start)
            if at is None or event.unload:
                continue
            if event.prog_id is None and _can_be(event, program, at):
                self._identify(event, program, at)
            if event.prog_id == program.id:
                del wanted[event.start]
                if not wanted:
                    return

    def _identify(self, event: Event, program: ProgramInfo, at: int) -> None:
        event.prog_id = program.id
        event.there = True
        event.length = program.functions[at][1]
        event.earliest = max(event.earliest, program.load_time)
        parts = split_bpf_name(event.name)
        if parts is None or parts[0] != program.tags[at]:
            # A main program without a name, or a subprogram with the main one's: heal.
            try:
                names = self._reader.function_names(program.id)
            except SourceError:
                names = []
            event.name = names[at] if at < len(names) else ""

    def _claim_unloads(self, lane: list[Event | BpfEvent], here: Here) -> None:
        """Give the unloads that a BPF_EVENT follows to its program."""
        pending: deque[Event] = deque(maxlen=_MOST_PENDING)
        for item in lane:
            if isinstance(item, Event):
                if item.unload:
                    pending.append(item)
            elif item.type == PROG_UNLOAD and item.id:
                sure = False
                for event in pending:
                    if event.prog_id is None and self._ends_program(event, item.id, here):
                        sure = True
                if not sure:
                    _claim_by_tag(item, pending, None)

    def _ends_program(self, event: Event, prog_id: int, here: Here) -> bool:
        """Give an unload to a program that is known to have been at its start."""
        name = here.get((event.start, prog_id))
        if name is None:
            known, known_id = self.live.get(event.start, ("", None))
            if known_id != prog_id:
                return False
            name = known
        event.prog_id = prog_id
        # The name it was loaded under: kernels that announce a wrong one do so twice.
        event.name = name
        return True


def _lane(
    records: Iterable[Record], ring: int, earliest: int, events: list[Event]
) -> list[Event | BpfEvent]:
    """One ring's records with events in place of KSYMBOLs; these join ``events``."""
    lane: list[Event | BpfEvent] = []
    for record in records:
        if isinstance(record, BpfEvent):
            lane.append(record)
        # Without a length it is not JITed, and the address is the interpreter's.
        elif isinstance(record, KSymbol) and record.length:
            event = Event(record, ring, len(events), earliest)
            events.append(event)
            if record.type == KSYMBOL_BPF:
                lane.append(event)
    return lane


def _claim_by_tag(record: BpfEvent, events: Iterable[Event], there: bool | None) -> None:
    """Without bpf(2)'s help: the main function is the one with the tag, if one alone is."""
    free = [event for event in events if event.prog_id is None and not event.doubtful]
    mains = [event for event in free if _tag(event) == record.tag]
    mains = mains or [event for event in free if not event.name]
    if len(mains) == 1:
        mains[0].prog_id = record.id
        mains[0].there = there
        return
    # The same name several times over: either one program was loaded as often, or its
    # subprograms were announced under the main function's name (Linux 5.7 to 6.0).
    for at, event in enumerate(mains):
        event.doubtful = True
        if at and not event.unload:
            event.name = ""


def _tag(event: Event) -> str:
    parts = split_bpf_name(event.name)
    return parts[0] if parts is not None else ""


def _can_be(event: Event, program: ProgramInfo, at: int) -> bool:
    """Whether a load can be that of this function of a program."""
    if event.type != KSYMBOL_BPF:
        return False
    # Early kernels announce the main function under its own tag (Linux 5.0 to 5.6).
    return not event.name or _tag(event) in (program.tag, program.tags[at], program.split_tag)


def _change(event: Event, latest: int) -> Load | Unload:
    event.latest = latest - event.rank
    if event.unload:
        name = event.name if event.name and event.name != UNNAMED_BPF else None
        earliest = min(event.earliest, event.latest)
        return Unload(event.start, earliest, event.latest, name, event.prog_id)
    event.reported = event.name
    return _load(event, event.latest)


def _load(event: Event, latest: int) -> Load:
    name = event.name or UNNAMED_BPF
    end = event.start + event.length
    if event.type == KSYMBOL_OOL:
        symbol = Symbol(event.start, end, name, OOL, _OOL_MODULES.get(name))
        return Load(symbol, min(event.earliest, latest), latest)
    kind = bpf_kind(name)
    open_ended = kind != BPF_PROG and event.length % _IMAGE_LENGTH == 0
    symbol = Symbol(event.start, end, name, kind, BPF_MODULE)
    return Load(symbol, min(event.earliest, latest), latest, event.prog_id, open_ended)
