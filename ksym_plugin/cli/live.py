"""The live system, for whoever has no history."""

from __future__ import annotations

from ksym_plugin.cli.output import say
from ksym_plugin.errors import KallsymsError, SourceError
from ksym_plugin.kallsyms import Kallsyms
from ksym_plugin.line_table import unpack
from ksym_plugin.sources import bpf_details, snapshot
from ksym_plugin.sources.traced import Targets
from ksym_plugin.symbols import OUTSIDE_HISTORY, Lifetime, trampoline_key
from ksym_plugin.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.line_table import Line, LineTable
    from ksym_plugin.timeline import Answer

_HIDDEN = KallsymsError(
    "kernel addresses are hidden from this user",
    "run as root or with CAP_SYSLOG, and set kernel.kptr_restrict below 2 "
    "(sysctl kernel.kptr_restrict=1)",
)


class Lines:
    """The source lines of the programs that are loaded now, and what is traced now."""

    def __init__(self) -> None:
        self._reader = bpf_details.Reader()
        self._targets = Targets()
        self._known: dict[int, tuple[list[int], LineTable]] = {}

    def traced(self, lifetime: Lifetime, /) -> str | None:
        key = trampoline_key(lifetime.symbol.name)
        return None if key is None else self._targets.name(key) or None

    def line(self, lifetime: Lifetime, offset: int, /) -> Line | None:
        if lifetime.prog_id is None:
            return None
        starts, table = self._known.get(lifetime.prog_id) or self._read(lifetime.prog_id)
        start = lifetime.symbol.start
        return table.find(starts.index(start), offset) if start in starts else None

    def _read(self, prog_id: int) -> tuple[list[int], LineTable]:
        try:
            details = self._reader.read(prog_id)
        except OSError:
            return [], unpack(b"")
        starts = [start for start, _, _ in details.functions]
        self._known[prog_id] = known = (starts, unpack(details.lines))
        return known


class Unrecorded:
    """A past of which nothing is known: BPF names of now say nothing about then."""

    __slots__ = ()
    extent = 0
    has_modules = False

    def at(self, address: int, time_ns: int, /) -> Answer:
        return None, OUTSIDE_HISTORY


def lifetimes() -> list[Lifetime]:
    """What BPF symbols the kernel holds now. SourceError if it does not tell."""
    taken = snapshot.take()
    if taken.limit:
        say(taken.limit)
    return [Lifetime(load) for load in taken.loads]


def timeline() -> Timeline | None:
    """The same as a past that answers for now; None, and said why, if it is not told."""
    table = Timeline()
    try:
        for lifetime in lifetimes():
            table.enter(lifetime)
    except SourceError as error:
        say(f"BPF programs have names only as kallsyms lists them: {error}")
        return None
    return table


def kallsyms(needed: bool) -> Kallsyms | None:
    """The static symbols of this kernel. Where they are ``needed``, KallsymsError without them."""
    try:
        table = Kallsyms.load()
        if table.hidden:
            raise _HIDDEN
    except KallsymsError as error:
        if needed:
            raise
        say(f"only BPF symbols have names here: {error}")
        return None
    return table
