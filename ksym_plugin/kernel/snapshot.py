"""What BPF symbols the kernel holds now.

Addresses and lengths come from bpf(2), names and images from kallsyms. Where bpf(2) is
refused kallsyms alone has to do, and lengths are unknown.
"""

from __future__ import annotations

import time

from ksym_plugin.kernel import bpf_prog
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

    from ksym_plugin.kernel.bpf_prog import Program

KALLSYMS = "/proc/kallsyms"
_OOL_PREFIX = "[__builtin__"
_MARKS = (b"\t[bpf]\n", b"\t[__builtin__")


class Lines:
    """``bpf``: (start, name) by start; ``ool``: (start, name, module) of other code."""

    __slots__ = ("bpf", "ool")

    def __init__(self) -> None:
        self.bpf: list[tuple[int, str]] = []
        self.ool: list[tuple[int, str, str]] = []


def read_lines(path: str = KALLSYMS) -> Lines:
    """What kallsyms lists now.

    Empty where there is no kallsyms and where addresses are hidden (they are all zero
    then); without ``bpf`` where net.core.bpf_jit_kallsyms is 0.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except OSError:
        return Lines()
    return parse_lines(data)


def parse_lines(data: bytes) -> Lines:
    """The lines in kallsyms' text."""
    # The kernel lists them near the end: what comes before is never looked at by Python.
    found = [at for at in (data.find(mark) for mark in _MARKS) if at >= 0]
    lines = Lines()
    if not found:
        return lines
    block = data[data.rfind(b"\n", 0, min(found)) + 1 :]
    for line in block.decode("utf-8", "backslashreplace").split("\n"):
        fields = line.split()
        if len(fields) == 4:
            _sort_in(lines, fields[0], fields[2], fields[3])
    lines.bpf.sort()
    lines.ool.sort()
    return lines


def _sort_in(lines: Lines, start: str, name: str, module: str) -> None:
    try:
        address = int(start, 16)
    except ValueError:
        return
    if not address:
        return
    if module == BPF_MODULE:
        lines.bpf.append((address, name))
    elif module.startswith(_OOL_PREFIX):
        lines.ool.append((address, name, module[1:-1]))


#: How far an image can reach: the kernel allocates a page for each (PAGE_SIZE of the
#: smallest kind), and so much PERF_RECORD_KSYMBOL claims.
IMAGE_REACH = 4096
#: A FineIBT preamble, kept as a symbol of its own in front of a program.
_CFI_PREFIX = "__cfi_"
_CFI_LENGTH = 16

#: BPF_PROG_TYPE_SOCKET_FILTER and BPF_PROG_TYPE_CGROUP_SKB: what users without privileges
#: may load, where kernel.unprivileged_bpf_disabled is 0.
_UNPRIVILEGED = (1, 8)

#: So many programs' names are read from their BTF one by one; for more, kallsyms is faster.
_FEW = 32

_NO_LENGTHS = "lengths of programs loaded before the start are unknown"


class Snapshot:
    """``loads`` by start; ``limit`` says in one sentence what it lacks, if anything.

    ``lists_images`` says that kallsyms showed BPF, if only programs: there are no other
    images than those in ``loads``.
    """

    __slots__ = ("limit", "lists_images", "loads")

    def __init__(self, loads: list[Load], limit: str, lists_images: bool = False) -> None:
        self.loads = loads
        self.limit = limit
        self.lists_images = lists_images


class Taker:
    """Takes snapshots, and opens only those programs that the one before did not have.

    An id is a program's for good, until 2^31 others have been loaded.
    """

    def __init__(self, symbols_only: bool = False) -> None:
        """``symbols_only`` leaves out programs that the kernel gives no symbols.

        They are those of users without privileges, and go without bpf_ksym_del() too.
        """
        self._symbols_only = symbols_only
        self._known: dict[int, list[Load]] = {}

    def take(self, images: bool = True) -> Snapshot:
        """Everything there is now. SourceError if nothing can be told at all.

        Without ``images`` it may be the programs alone: kallsyms is not read if that can
        be helped, since it takes long where there are many. A program's ``earliest`` is
        when its loading began; that of an image, and of everything where bpf(2) is
        refused, is 0. ``latest`` is a time at which it was there.
        """
        lines = read_lines() if images else Lines()
        try:
            new = self._new_programs()
        except SourceError as error:
            return _fallback(lines, error)
        if any(program.hidden for program in new):
            hidden = SourceError(bpf_prog.HIDDEN_PROBLEM, bpf_prog.HIDDEN_REMEDY)
            return _fallback(lines, hidden)
        now = time.monotonic_ns()
        doubtful = [program for program in new if self._may_lack_symbols(program)]
        if not images and (doubtful or sum(program.has_btf for program in new) > _FEW):
            lines = read_lines()
        names = dict(lines.bpf)
        for program in new:
            self._known[program.id] = program_loads(program, names, program.load_time, now)
        for program in doubtful:
            if not any(start in names for start, _ in program.functions):
                self._known[program.id] = []
        loads = [load for known in self._known.values() for load in known]
        return Snapshot(_sorted(loads, image_loads(lines, 0, now)), "", bool(lines.bpf))

    def _may_lack_symbols(self, program: Program) -> bool:
        return self._symbols_only and program.uid != 0 and program.type in _UNPRIVILEGED

    def _new_programs(self) -> list[Program]:
        """The programs not known yet; those that are gone are forgotten."""
        listed = list(bpf_prog.program_ids())
        known = self._known
        self._known = {prog_id: known[prog_id] for prog_id in listed if prog_id in known}
        return list(bpf_prog.by_id(id for id in listed if id not in known))


def take() -> Snapshot:
    """Everything there is now; see ``Taker``."""
    return Taker().take()


def _fallback(lines: Lines, error: SourceError) -> Snapshot:
    """What kallsyms alone tells."""
    if not lines.bpf:
        raise error
    loads = without_lengths(lines, time.monotonic_ns())
    return Snapshot(loads, f"{error}; {_NO_LENGTHS}", True)


def _sorted(programs: Iterable[Load], images: list[Load]) -> list[Load]:
    """All of them by start; those of programs are copies, for the caller to change."""
    by_start: dict[int, Load] = {}
    for load in programs:
        known = by_start.get(load.symbol.start)
        # Two at one start: the older one went away during the walk.
        if known is None or (known.prog_id or 0) < (load.prog_id or 0):
            copy = Load(load.symbol, load.earliest, load.latest, load.prog_id)
            by_start[load.symbol.start] = copy
    for load in images:
        by_start.setdefault(load.symbol.start, load)
    return [by_start[start] for start in sorted(by_start)]


def image_loads(lines: Lines, earliest: int, latest: int) -> list[Load]:
    """What the lines hold beside programs, which bpf(2) lists better."""
    loads = _ool_loads(lines, earliest, latest)
    for start, name in lines.bpf:
        kind = bpf_kind(name)
        if kind == BPF_PROG:
            continue
        preamble = name.startswith(_CFI_PREFIX)
        length = _CFI_LENGTH if preamble else IMAGE_REACH
        symbol = Symbol(start, start + length, name, kind, BPF_MODULE)
        loads.append(Load(symbol, earliest, latest, None, not preamble))
    return loads


def _ool_loads(lines: Lines, earliest: int, latest: int) -> list[Load]:
    loads: list[Load] = []
    for start, name, module in lines.ool:
        symbol = Symbol(start, start + IMAGE_REACH, name, OOL, module)
        loads.append(Load(symbol, earliest, latest, None, True))
    return loads


def without_lengths(lines: Lines, now: int) -> list[Load]:
    """Loads from kallsyms alone: each may reach to the next one, for a page at most."""
    loads = _ool_loads(lines, 0, now)
    starts = [start for start, _ in lines.bpf]
    for (start, name), following in zip(lines.bpf, [*starts[1:], 1 << 64]):
        if following > start:
            end = min(following, start + IMAGE_REACH)
            symbol = Symbol(start, end, name, bpf_kind(name), BPF_MODULE)
            loads.append(Load(symbol, 0, now, None, True))
    return loads


def program_loads(
    program: Program, names: dict[int, str], earliest: int, latest: int
) -> list[Load]:
    """Loads of a program and its subprograms, with kallsyms' ``names`` where they fit."""
    own: list[str] = []
    loads: list[Load] = []
    for at, (start, length) in enumerate(program.functions):
        name = names.get(start, "")
        if not _fits(name, program, at):
            own = own or _own_names(program)
            name = own[at] if at < len(own) and own[at] else UNNAMED_BPF
        symbol = Symbol(start, start + length, name, BPF_PROG, BPF_MODULE)
        loads.append(Load(symbol, min(earliest, latest), latest, program.id))
    return loads


def _fits(name: str, program: Program, at: int) -> bool:
    """Whether kallsyms' line was about this function, and not one that was there before."""
    parts = split_bpf_name(name)
    if parts is None or parts[0] != program.tags[at]:
        return False
    return at > 0 or not program.name or parts[1].startswith(program.name)


def _own_names(program: Program) -> list[str]:
    """The functions' names by bpf(2); without them where the program is gone."""
    if not program.has_btf:
        return bpf_prog.plain_names(program)
    return bpf_prog.function_names(program.id) or _short_names(program)


def _short_names(program: Program) -> list[str]:
    """What is left to call a program by that is gone: only its main function has a name."""
    rest = f"_{program.name}" if program.name else ""
    return [f"bpf_prog_{program.tag}{rest}"]
