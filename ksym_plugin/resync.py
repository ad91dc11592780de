"""Makes a table equal to the kernel's, at the start and after changes were lost."""

from __future__ import annotations

from ksym_plugin.symbols import BPF_MODULE, BPF_PROG, Unload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.symbols import Lifetime, Load, Loss

#: How many times its own length a resync is followed by without another one.
REST: Final = 10


def differences(
    live: dict[int, Lifetime],
    snapshot: list[Load],
    lists_images: bool,
    times: tuple[int, int, int],
) -> list[Load | Unload | Loss]:
    """The changes that turn what is held live into what a snapshot found.

    All but programs are listed by kallsyms alone, where BPF may be hidden: their absence
    counts only where it was seen to list BPF (``Source.lists_images``), or others of their
    kind. What differs changed after the first of ``times``; the snapshot was taken between
    the others.
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
        judged = lifetime.symbol.kind == BPF_PROG or lifetime.symbol.module in listed
        if judged and lifetime.loaded_latest < began:
            earliest = max(since, lifetime.loaded_earliest)
            name, prog_id = lifetime.symbol.name, lifetime.prog_id
            changes.append(Unload(start, earliest, ended, name, prog_id))
    for start, load in found.items():
        known = live.get(start)
        if known is None or not _is_same(known, load):
            # What was seen there before is not of a later time for being found again.
            load.earliest = min(max(load.earliest, since), load.latest)
        changes.append(load)
    return changes


def _is_same(lifetime: Lifetime, load: Load) -> bool:
    if lifetime.prog_id is not None and load.prog_id is not None:
        return lifetime.prog_id == load.prog_id
    return lifetime.symbol.name == load.symbol.name
