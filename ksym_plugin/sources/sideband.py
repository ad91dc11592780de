"""From the records of one drain to changes: which program, which name, in which order.

The kernel announces a program as one KSYMBOL for each function, the main one first, and then
a BPF_EVENT with its id and the main function's tag (perf_event_bpf_event() in kernel/bpf).
Between two of them the task can be preempted by another one that loads, or move to another
CPU and so to another ring. So nothing is taken from the order alone: what bpf(2) says of a
program that is still loaded decides, and failing that a tag that only one record fits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Optional, Union

    from ksym_plugin.kernel.bpf_prog import ProgramInfo
    from ksym_plugin.kernel.perf_ring import Record

    #: Name and program id of a symbol; "" and None where they are not known.
    Known = tuple[str, Optional[int]]
    Item = Union["Event", BpfEvent]

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


@dataclass(eq=False)
class Event:
    """A load or unload while its program and its order are worked out."""

    start: int
    length: int
    name: str
    type: int
    is_unload: bool
    #: Of which ring, and where in it.
    ring: int
    number: int
    earliest: int
    latest: int = 0
    prog_id: int | None = None
    #: Whether the program was still in the kernel after the drain; None if that is not known.
    is_loaded: bool | None = None
    #: One of several that a BPF_EVENT may have been about.
    is_ambiguous: bool = False

    @property
    def tag(self) -> str:
        """The tag in its name, ``""`` without one."""
        parts = split_bpf_name(self.name)
        return parts[0] if parts is not None else ""

    def lacks_program(self) -> bool:
        """Whether this is a program's load whose BPF_EVENT has not been seen."""
        if self.is_unload or self.prog_id is not None or self.type != KSYMBOL_BPF:
            return False
        return bpf_kind(self.name) == BPF_PROG

    def can_be_of(self, name: str, prog_id: int | None) -> bool:
        """Whether it can be about the symbol of this name and program id."""
        if self.prog_id is not None and prog_id is not None:
            return self.prog_id == prog_id
        return not self.name or name in ("", self.name)


class Sideband:
    """Turns records into changes; remembers what is loaded to know what an unload ends."""

    def __init__(self, reader: ProgramReader | None = None) -> None:
        self._reader = reader or ProgramReader()
        #: What is loaded, by start.
        self.live: dict[int, Known] = {}
        #: Loads of the drain before that were reported without a program.
        self._without_program: list[Event] = []

    def know(self, loads: Iterable[Load]) -> None:
        """Take in a snapshot."""
        for load in loads:
            name = load.symbol.name if load.symbol.name != UNNAMED_BPF else ""
            self.live[load.symbol.start] = (name, load.prog_id)

    def changes(
        self, rings: Iterable[list[Record]], earliest: int, latest: int
    ) -> list[Load | Unload]:
        """The changes of one drain: each ring's records, and the window they fall in.

        They come by ``latest``, at one start in the order they happened, and of those
        with the same ``latest`` unloads first. A load whose program is known only now
        comes a second time, with the id.
        """
        by_ring = [_items(records, ring, earliest) for ring, records in enumerate(rings)]
        events = [item for item in chain(*by_ring) if isinstance(item, Event)]
        incomplete = [program for items in by_ring for program in self._identify_loads(items)]
        late = self._complete(incomplete, events)
        self._identify_unloads(by_ring, events)
        self._without_program = [event for event in events if event.lacks_program()]
        return [_change(event) for event in (*late, *in_order(events, self.live, latest))]

    def _identify_loads(self, items: list[Item]) -> list[ProgramInfo]:
        """Give the loads in one ring the ids of their programs.

        Returned are the programs some of whose functions are not in this ring: the task moved
        to another CPU while it announced them.
        """
        incomplete: list[ProgramInfo] = []
        for record, pending in _announcements(items, PROG_LOAD):
            program, is_loaded = self._look_up(record)
            if program is None:
                _identify_by_tag(record, pending, is_loaded)
            elif self._give(program, reversed(pending)):
                incomplete.append(program)
        return incomplete

    def _look_up(self, record: BpfEvent) -> tuple[ProgramInfo | None, bool | None]:
        """The program, if bpf(2) shows where it is; whether it is loaded, if that is known."""
        try:
            program = self._reader.program(record.id)
        except SourceError:
            return None, None
        if program is None or program.tag != record.tag:
            return None, False
        return (program if program.functions else None), True

    def _complete(self, programs: list[ProgramInfo], events: list[Event]) -> list[Event]:
        """Find programs' loads in all rings; those that were reported without an id."""
        for program in programs:
            self._give(program, chain(reversed(events), reversed(self._without_program)))
        late = [event for event in self._without_program if event.prog_id is not None]
        for event in late:
            # Unless a program that is known was loaded there since.
            if self.live.get(event.start, ("", 0))[1] is None:
                self.live[event.start] = (event.name, event.prog_id)
        return late

    def _give(self, program: ProgramInfo, events: Iterable[Event]) -> bool:
        """Give loads, the latest first, the id of a loaded program; whether some are missing."""
        wanted = {start: index for index, (start, _) in enumerate(program.functions)}
        for event in events:
            index = wanted.get(event.start)
            if index is None or event.is_unload:
                continue
            if event.prog_id is None and _can_be(event, program, index):
                self._identify(event, program, index)
            if event.prog_id == program.id:
                del wanted[event.start]
                if not wanted:
                    break
        return bool(wanted)

    def _identify(self, event: Event, program: ProgramInfo, index: int) -> None:
        event.prog_id = program.id
        event.is_loaded = True
        event.length = program.functions[index][1]
        event.earliest = max(event.earliest, program.load_time)
        if event.tag != program.tags[index]:
            # A main program without a name, or a subprogram with the main one's.
            try:
                names = self._reader.function_names(program.id)
            except SourceError:
                names = []
            event.name = names[index] if index < len(names) else ""

    def _identify_unloads(self, by_ring: list[list[Item]], events: list[Event]) -> None:
        """Give the unloads in each ring the ids of their programs."""
        names = {
            (event.start, event.prog_id): event.name
            for event in events
            if not event.is_unload and event.prog_id is not None
        }
        for items in by_ring:
            for record, pending in _announcements(items, PROG_UNLOAD):
                free = [event for event in pending if event.prog_id is None]
                ended = [event for event in free if self._ends_program(event, record.id, names)]
                if record.id and not ended:
                    _identify_by_tag(record, free, None)

    def _ends_program(self, event: Event, prog_id: int, names: dict[tuple[int, int], str]) -> bool:
        """Give an unload the id of a program that is known to have been at its start."""
        name = names.get((event.start, prog_id))
        if name is None:
            name, known_id = self.live.get(event.start, ("", None))
            if known_id != prog_id:
                return False
        event.prog_id = prog_id
        # The name it was loaded under: kernels that announce a wrong one do so twice.
        event.name = name
        return True


def _items(records: Iterable[Record], ring: int, earliest: int) -> list[Item]:
    """One ring's BPF_EVENTs, and events in place of its KSYMBOLs."""
    items: list[Item] = []
    for record in records:
        if isinstance(record, BpfEvent):
            items.append(record)
        # Without a length it is not JITed, and the address is the interpreter's.
        elif isinstance(record, KSymbol) and record.length:
            event = Event(
                record.start, record.length, record.name, record.type,
                record.unregister, ring, len(items), earliest,
            )  # fmt: skip
            items.append(event)
    return items


def _announcements(items: list[Item], type: int) -> Iterator[tuple[BpfEvent, deque[Event]]]:
    """Each BPF_EVENT of a type, with the KSYMBOLs before it that may be its own."""
    pending: deque[Event] = deque(maxlen=_MOST_PENDING)
    for item in items:
        if isinstance(item, BpfEvent):
            if item.type == type:
                yield item, pending
        elif item.type == KSYMBOL_BPF and item.is_unload == (type == PROG_UNLOAD):
            pending.append(item)


def _identify_by_tag(record: BpfEvent, events: Iterable[Event], is_loaded: bool | None) -> None:
    """Without bpf(2)'s help: the main function is the one with the tag, if one alone is."""
    free = [event for event in events if event.prog_id is None and not event.is_ambiguous]
    mains = [event for event in free if event.tag == record.tag]
    mains = mains or [event for event in free if not event.name]
    if len(mains) == 1:
        mains[0].prog_id = record.id
        mains[0].is_loaded = is_loaded
        return
    # The same name several times over: either one program was loaded as often, or its
    # subprograms were announced under the main function's name (Linux 5.7 to 6.0).
    for number, event in enumerate(mains):
        event.is_ambiguous = True
        if number and not event.is_unload:
            event.name = ""


def _can_be(event: Event, program: ProgramInfo, index: int) -> bool:
    """Whether a load can be that of this function of a program."""
    if event.type != KSYMBOL_BPF:
        return False
    # Early kernels announce the main function under its own tag (Linux 5.0 to 5.6).
    return not event.name or event.tag in (program.tag, program.tags[index], program.split_tag)


def in_order(events: list[Event], live: dict[int, Known], latest: int) -> list[Event]:
    """The events in the order in which they happened, by ``latest``; brings ``live`` up to date."""
    by_start: dict[int, list[Event]] = {}
    for event in events:
        by_start.setdefault(event.start, []).append(event)
    for start, found in by_start.items():
        group = _sequence(found, live.get(start)) if len(found) > 1 else found
        earliest = 0
        for followers, event in zip(reversed(range(len(group))), group):
            event.latest = latest - followers
            earliest = event.earliest = max(event.earliest, earliest)
        last = group[-1]
        if not last.is_unload:
            live[start] = (last.name, last.prog_id)
        elif start in live and (len(group) > 1 or last.can_be_of(*live[start])):
            del live[start]
    return sorted(events, key=lambda event: (event.latest, not event.is_unload))


def _sequence(group: list[Event], before: Known | None) -> list[Event]:
    """The events at one start in the order they happened; ``before`` is what was there."""
    loads = [event for event in group if not event.is_unload]
    if before is not None and before[1] in {load.prog_id for load in loads} - {None}:
        # A snapshot showed it before its load was read.
        before = None
    unloads: dict[Event, Event] = {}
    ordered: list[Event] = []
    for unload in (event for event in group if event.is_unload):
        load = _load_of(unload, [load for load in loads if load not in unloads])
        is_sure = load is not None and load.prog_id is not None and load.prog_id == unload.prog_id
        if before is not None and not is_sure and unload.can_be_of(*before):
            before = None
            ordered.append(unload)
        elif load is not None:
            unloads[load] = unload
        else:
            ordered.append(unload)
    if all(load.prog_id is not None for load in loads):
        # Ids ascend and go round once in 2^31 programs, which is then one drain wrong.
        loads.sort(key=lambda load: load.prog_id or 0)
    # One that is still loaded came last.
    loads.sort(key=lambda load: load not in unloads)
    for load in loads:
        ordered += [load, unloads[load]] if load in unloads else [load]
    return ordered


def _load_of(unload: Event, loads: list[Event]) -> Event | None:
    """The load in the same drain that an unload can be the end of."""
    fitting = [
        load
        for load in loads
        if not load.is_loaded
        and not (load.ring == unload.ring and load.number > unload.number)
        and unload.can_be_of(load.name, load.prog_id)
    ]
    # The one of the same program, if that is known.
    same = [load for load in fitting if load.prog_id is not None and load.prog_id == unload.prog_id]
    return next(iter(same + fitting), None)


def _change(event: Event) -> Load | Unload:
    earliest = min(event.earliest, event.latest)
    if event.is_unload:
        return Unload(event.start, earliest, event.latest, event.name or None, event.prog_id)
    name = event.name or UNNAMED_BPF
    is_ool = event.type == KSYMBOL_OOL
    kind = OOL if is_ool else bpf_kind(name)
    module = _OOL_MODULES.get(name) if is_ool else BPF_MODULE
    open_ended = kind not in (OOL, BPF_PROG) and event.length % _IMAGE_LENGTH == 0
    symbol = Symbol(event.start, event.start + event.length, name, kind, module)
    return Load(symbol, earliest, event.latest, event.prog_id, open_ended)
