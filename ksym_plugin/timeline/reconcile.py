"""Corrects a timeline by what the kernel answers when it is asked.

``differences`` compares the live lifetimes with a snapshot: the changes between them.

``heal`` gives the lifetimes of a program their id and names, from bpf(2) and BTF. Linux
0108a4e9f358 to 0be9ae5486cd announced main programs that have subprograms without a name,
and some kernels before that gave subprograms the main one's. A lifetime belongs to a program
if it was loaded at the start of one of its functions after the loading of the program began.
"""

from __future__ import annotations

from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    UNNAMED_BPF,
    Symbol,
    Unload,
    split_bpf_name,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.program import ProgramDetails
    from ksym_plugin.timeline.symbols import Lifetime, Load, Loss
    from ksym_plugin.timeline.timeline import Timeline


def differences(
    live: dict[int, Lifetime],
    snapshot: list[Load],
    lists_images: bool,
    times: tuple[int, int, int],
) -> list[Load | Unload | Loss]:
    """The changes that turn the live lifetimes, by start, into what a snapshot found.

    Only kallsyms lists what is not a program, and it may hide BPF. So the absence of such a
    symbol counts only where kallsyms was seen to list BPF (``Source.lists_images``), or other
    symbols of its module. ``times`` are since when a difference can have come about, and when
    the snapshot began and ended.
    """
    since, began, ended = times
    changes: list[Load | Unload | Loss] = []
    found = {load.symbol.start: load for load in snapshot}
    listed = {load.symbol.module for load in snapshot if load.symbol.kind != BPF_PROG}
    if lists_images:
        listed.add(BPF_MODULE)
    for start, lifetime in live.items():
        load = found.get(start)
        if load is not None and _is_same(lifetime, load):
            continue
        symbol, earliest = lifetime.symbol, max(since, lifetime.loaded_earliest)
        is_gone = symbol.kind == BPF_PROG or symbol.module in listed
        if is_gone and lifetime.loaded_latest < began:
            changes.append(Unload(start, earliest, ended, symbol.name, lifetime.prog_id))
    for start, load in found.items():
        known = live.get(start)
        if known is None or not _is_same(known, load):
            # A symbol that was known already keeps its own, earlier, window.
            load.earliest = min(max(load.earliest, since), load.latest)
        changes.append(load)
    return changes


def _is_same(lifetime: Lifetime, load: Load) -> bool:
    if lifetime.prog_id is not None and load.prog_id is not None:
        return lifetime.prog_id == load.prog_id
    return lifetime.symbol.name == load.symbol.name


def heal(timeline: Timeline, program: ProgramDetails) -> list[Lifetime]:
    """Give a program's lifetimes its id and its names; returns those that changed."""
    changed = []
    for start, _, name in program.functions:
        lifetime = _function(timeline.started_at(start), program, name)
        if lifetime is None:
            continue
        is_better = _is_better(name, lifetime.symbol.name)
        if lifetime.prog_id != program.id or is_better:
            changed.append(lifetime)
        lifetime.prog_id = program.id
        if is_better:
            lifetime.symbol = Symbol(start, lifetime.symbol.end, name, BPF_PROG, BPF_MODULE)
    return changed


def _function(there: list[Lifetime], program: ProgramDetails, name: str) -> Lifetime | None:
    """Which of the lifetimes at a function's start is the function; None if that is not sure."""
    for lifetime in reversed(there):
        if lifetime.prog_id == program.id:
            return lifetime
    for lifetime in there:
        ended, began = lifetime.unloaded_latest, program.load_time
        if lifetime.loaded_latest < began or (ended is not None and ended < began):
            continue
        # A program that was there first has its own id by now. One that came next and has
        # been announced already has another name.
        fits = lifetime.prog_id is None and _can_be(lifetime.symbol.name, program, name)
        return lifetime if fits else None
    return None


def _can_be(announced: str, program: ProgramDetails, name: str) -> bool:
    """Whether the kernel can have announced a function under this name."""
    return announced in (UNNAMED_BPF, name) or _tag(announced) in (program.tag, _tag(name))


def _is_better(name: str, known: str) -> bool:
    """Whether ``known`` is no name, another function's, or a shorter form of ``name``."""
    if not name or name == known:
        return False
    return known == UNNAMED_BPF or _tag(known) != _tag(name) or name.startswith(known)


def _tag(name: str) -> str:
    return (split_bpf_name(name) or ("",))[0]
