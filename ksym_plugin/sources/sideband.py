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

from ksym_plugin.kernel import bpf_prog
from ksym_plugin.kernel.perf_ring import (
    KSYMBOL_BPF,
    KSYMBOL_OOL,
    PROG_LOAD,
    PROG_UNLOAD,
    BpfEvent,
    KSymbol,
)
from ksym_plugin.sources.ordering import Event, in_order
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
    from collections.abc import Callable, Iterable
    from typing import Final

    from ksym_plugin.kernel.bpf_prog import Program
    from ksym_plugin.kernel.perf_ring import Record

    #: (start, program id) to the name it was loaded under in the drain at hand.
    Here = dict[tuple[int, int], str]

#: The granule of an image's length in a record, whatever its true length is.
_IMAGE_LENGTH: Final = 4096
#: How far back a BPF_EVENT may lie behind its KSYMBOLs: twice the functions a program
#: can have (BPF_MAX_SUBPROGS), and a bound on the work that records can make.
_MOST_PENDING: Final = 512
#: Modules that kallsyms gives to out-of-line code (kernel/kallsyms.c).
_OOL_MODULES: Final = {
    "ftrace_trampoline": "__builtin__ftrace",
    "kprobe_insn_page": "__builtin__kprobes",
    "kprobe_optinsn_page": "__builtin__kprobes",
}


class Sideband:
    """Turns records into changes; remembers what is live to tell whose end an end is."""

    def __init__(
        self,
        program: Callable[[int], Program | None] = bpf_prog.program,
        function_names: Callable[[int], list[str]] = bpf_prog.function_names,
    ) -> None:
        self._program = program
        self._function_names = function_names
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
        strays: list[Program] = []
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

    def _claim_loads(self, lane: list[Event | BpfEvent], strays: list[Program]) -> None:
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

    def _look_up(self, record: BpfEvent) -> tuple[Program | None, bool | None]:
        """The program, if bpf(2) tells where it is; and whether it is there, if known."""
        try:
            program = self._program(record.id)
        except SourceError:
            return None, None
        if program is None or program.tag != record.tag:
            return None, False
        return (program if program.functions else None), True

    def _claim_strays(self, programs: list[Program], events: list[Event]) -> list[Load]:
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

    def _give(self, program: Program, wanted: dict[int, int], events: Iterable[Event]) -> None:
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

    def _identify(self, event: Event, program: Program, at: int) -> None:
        event.prog_id = program.id
        event.there = True
        event.length = program.functions[at][1]
        event.earliest = max(event.earliest, program.load_time)
        parts = split_bpf_name(event.name)
        if parts is None or parts[0] != program.tags[at]:
            # A main program without a name, or a subprogram with the main one's: heal.
            try:
                names = self._function_names(program.id)
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


def _can_be(event: Event, program: Program, at: int) -> bool:
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
