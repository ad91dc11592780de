"""What BPF symbols the kernel holds now.

Addresses and lengths come from bpf(2), names and images from kallsyms. Where bpf(2) is
refused kallsyms alone has to do, and lengths are unknown.
"""

from __future__ import annotations

import time

from ksym_plugin.kernel import privileges
from ksym_plugin.kernel.bpf_prog import ProgramReader, plain_names
from ksym_plugin.kernel.kallsyms import KALLSYMS, Tail, read_tail
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    OOL,
    UNNAMED_BPF,
    Load,
    Symbol,
    bpf_kind,
    split_bpf_name,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ksym_plugin.kernel.bpf_prog import ProgramInfo

#: How far an image can reach: the kernel allocates a page for each (PAGE_SIZE of the
#: smallest kind), and so much PERF_RECORD_KSYMBOL claims.
IMAGE_REACH = 4096
#: A FineIBT preamble, which is a symbol of its own in front of a program.
_CFI_PREFIX = "__cfi_"
_CFI_LENGTH = 16

#: BPF_PROG_TYPE_SOCKET_FILTER and BPF_PROG_TYPE_CGROUP_SKB: what users without privileges
#: may load, where kernel.unprivileged_bpf_disabled is 0.
_UNPRIVILEGED = (1, 8)

#: So many programs' names are read from their BTF one by one; for more, kallsyms is faster.
_FEW = 32


class Snapshot:
    """``loads`` by start; ``limit`` is a sentence about what is missing, if anything is.

    ``lists_images`` says that kallsyms showed BPF: there are no images but those in ``loads``.
    """

    def __init__(self, loads: list[Load], limit: str, lists_images: bool = False) -> None:
        self.loads = loads
        self.limit = limit
        self.lists_images = lists_images


class Taker:
    """Takes snapshots, and opens only those programs that the one before did not have: an id
    is a program's for good, until 2^31 others have been loaded."""

    def __init__(
        self,
        symbols_only: bool = False,
        reader: ProgramReader | None = None,
        kallsyms: str = KALLSYMS,
    ) -> None:
        """``symbols_only`` leaves out programs that the kernel gives no symbols.

        They are those of users without privileges, and go without bpf_ksym_del() too.
        """
        self._symbols_only = symbols_only
        self._reader = reader or ProgramReader()
        self._kallsyms = kallsyms
        self._known: dict[int, list[Load]] = {}

    def take(self, images: bool = True) -> Snapshot:
        """Everything there is now. SourceError if neither bpf(2) nor kallsyms shows any.

        Without ``images`` it may be the programs alone: kallsyms is not read if that can
        be helped, since it takes long where there are many. A program's ``earliest`` is
        when its loading began; that of an image, and of everything where bpf(2) is
        refused, is 0. ``latest`` is a time at which it was there.
        """
        tail = read_tail(self._kallsyms) if images else Tail([])
        try:
            new = self._new_programs()
        except SourceError as error:
            return _fallback(tail, error)
        if any(program.hidden for program in new):
            return _fallback(tail, privileges.programs_hidden())
        now = time.monotonic_ns()
        doubtful = {
            program.id
            for program in new
            if self._symbols_only and program.uid != 0 and program.type in _UNPRIVILEGED
        }
        if not images and (doubtful or sum(program.has_btf for program in new) > _FEW):
            tail = read_tail(self._kallsyms)
        names = dict(tail.bpf)
        for program in new:
            is_listed = any(start in names for start, _ in program.functions)
            loads = program_loads(program, self._reader, names, program.load_time, now)
            self._known[program.id] = loads if is_listed or program.id not in doubtful else []
        loads = [load for known in self._known.values() for load in known]
        return Snapshot(_sorted(loads, image_loads(tail, 0, now)), "", bool(tail.bpf))

    def _new_programs(self) -> list[ProgramInfo]:
        """The programs not known yet; those that are gone are forgotten."""
        listed = list(self._reader.ids())
        known = self._known
        self._known = {prog_id: known[prog_id] for prog_id in listed if prog_id in known}
        return list(self._reader.by_id(id for id in listed if id not in known))


def take() -> Snapshot:
    """Everything there is now; see ``Taker``."""
    return Taker().take()


def _fallback(tail: Tail, error: SourceError) -> Snapshot:
    """What kallsyms alone shows: each image reaches to the next one, a page at most."""
    if not tail.bpf:
        raise error
    now = time.monotonic_ns()
    loads = _ool_loads(tail, 0, now)
    starts = [start for start, _ in tail.bpf]
    for (start, name), following in zip(tail.bpf, [*starts[1:], 1 << 64]):
        if following > start:
            end = min(following, start + IMAGE_REACH)
            symbol = Symbol(start, end, name, bpf_kind(name), BPF_MODULE)
            loads.append(Load(symbol, 0, now, None, True))
    limit = f"{error}; lengths of programs loaded before the start are unknown"
    return Snapshot(loads, limit, True)


def _sorted(programs: Iterable[Load], images: list[Load]) -> list[Load]:
    """All of them by start; those of programs are copies, for the caller to change."""
    by_start = {load.symbol.start: load for load in reversed(images)}
    # Of two at one start the older one, which comes first, went away during the walk.
    for load in programs:
        copy = Load(load.symbol, load.earliest, load.latest, load.prog_id)
        by_start[load.symbol.start] = copy
    return [by_start[start] for start in sorted(by_start)]


def image_loads(tail: Tail, earliest: int, latest: int) -> list[Load]:
    """What kallsyms' tail lists beside programs, of which bpf(2) has more to say."""
    loads = _ool_loads(tail, earliest, latest)
    for start, name in tail.bpf:
        kind = bpf_kind(name)
        if kind == BPF_PROG:
            continue
        preamble = name.startswith(_CFI_PREFIX)
        length = _CFI_LENGTH if preamble else IMAGE_REACH
        symbol = Symbol(start, start + length, name, kind, BPF_MODULE)
        loads.append(Load(symbol, earliest, latest, None, not preamble))
    return loads


def _ool_loads(tail: Tail, earliest: int, latest: int) -> list[Load]:
    return [
        Load(Symbol(start, start + IMAGE_REACH, name, OOL, module), earliest, latest, None, True)
        for start, name, module in tail.ool
    ]


def program_loads(
    program: ProgramInfo, reader: ProgramReader, names: dict[int, str], earliest: int, latest: int
) -> list[Load]:
    """Loads of a program and its subprograms, with kallsyms' ``names`` where these are theirs."""
    own: list[str] = []
    loads: list[Load] = []
    for at, (start, length) in enumerate(program.functions):
        name = names.get(start, "")
        if not _fits(name, program, at):
            if not own:
                own = plain_names(program)
                if program.has_btf:  # Of one that is gone only the main function's is known.
                    own = reader.function_names(program.id) or own[:1]
            name = own[at] if at < len(own) and own[at] else UNNAMED_BPF
        symbol = Symbol(start, start + length, name, BPF_PROG, BPF_MODULE)
        loads.append(Load(symbol, min(earliest, latest), latest, program.id))
    return loads


def _fits(name: str, program: ProgramInfo, at: int) -> bool:
    """Whether kallsyms' line is this function's, and not of one that was there before."""
    parts = split_bpf_name(name)
    if parts is None or parts[0] != program.tags[at]:
        return False
    return at > 0 or not program.name or parts[1].startswith(program.name)
