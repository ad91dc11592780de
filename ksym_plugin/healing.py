"""Names and ids of programs put right by what bpf(2) and BTF say of them.

Linux 0108a4e9f358 to 0be9ae5486cd announced main programs that have subprograms without
a name, and some kernels before that gave subprograms the main one's. A function is the
one that was loaded at its start after the loading of its program began.
"""

from __future__ import annotations

from ksym_plugin.symbols import BPF_MODULE, BPF_PROG, UNNAMED_BPF, Symbol, split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.program_details import ProgramDetails
    from ksym_plugin.symbols import Lifetime
    from ksym_plugin.timeline import Timeline


def heal(timeline: Timeline, program: ProgramDetails) -> list[Lifetime]:
    """Give a program's lifetimes its id and its names; those that were changed."""
    changed = []
    for start, _, name in program.functions:
        lifetime = _function(timeline.started_at(start), program, name)
        if lifetime is None:
            continue
        symbol = lifetime.symbol
        is_better = _is_better(name, symbol.name)
        if lifetime.prog_id == program.id and not is_better:
            continue
        lifetime.prog_id = program.id
        if is_better:
            lifetime.symbol = Symbol(start, symbol.end, name, BPF_PROG, BPF_MODULE)
        changed.append(lifetime)
    return changed


def _function(there: list[Lifetime], program: ProgramDetails, name: str) -> Lifetime | None:
    """Of what began at a function's start the one that is the function, if that is sure."""
    for lifetime in reversed(there):
        if lifetime.prog_id == program.id:
            return lifetime
    for lifetime in there:
        ended = lifetime.unloaded_latest
        if lifetime.loaded_latest < program.load_time or (
            ended is not None and ended < program.load_time
        ):
            continue
        # Had another program the place first, that one was told of with its id; the place
        # may also have gone to the next one already, which then is called otherwise.
        fits = lifetime.prog_id is None and _can_be(lifetime.symbol.name, program, name)
        return lifetime if fits else None
    return None


def _can_be(announced: str, program: ProgramDetails, name: str) -> bool:
    """Whether the kernel can have announced a function so."""
    if announced in (UNNAMED_BPF, name):
        return True
    return _tag(announced) in (program.tag, _tag(name))


def _is_better(name: str, known: str) -> bool:
    """Whether ``name`` is the right one and ``known`` none, another function's or cut off."""
    if not name or name == known:
        return False
    return known == UNNAMED_BPF or _tag(known) != _tag(name) or name.startswith(known)


def _tag(name: str) -> str:
    parts = split_bpf_name(name)
    return "" if parts is None else parts[0]
