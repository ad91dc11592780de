"""Pairs loads with unloads into lifetimes, in whatever order they arrive.

One load may be reported twice: by the event stream, and by a snapshot taken meanwhile. An
unload may come before its load, as the buffers of their CPUs are read in turn. So no pairing
is final: a late report takes the unload that belongs to it, and what it displaces is paired
again. The result does not depend on the order of arrival.
"""

from __future__ import annotations

from ksym_plugin.timeline.index import AddressIndex, index_of, loaded_by
from ksym_plugin.timeline.symbols import MODULE, UNNAMED_BPF, Lifetime, Load, Symbol, Unload

#: Starts whose unloads are kept for loads still to come, and unloads kept for each.
_MOST_ORPHANS = 4096
_MOST_AT_ONE_START = 64


class Pairing:
    """Makes lifetimes of reports and enters them in ``index``."""

    def __init__(self, index: AddressIndex) -> None:
        self.index = index
        self._orphans: dict[int, list[Unload]] = {}
        #: Lifetimes that late reports changed besides the one they were about.
        self.disturbed: list[Lifetime] = []

    def load(self, load: Load) -> Lifetime | None:
        """The lifetime this load began, or narrowed if it was known; None for length 0."""
        symbol = load.symbol
        start = symbol.start
        if symbol.end <= start:
            return None
        same_start = self.index.starts.get(start)
        is_next = same_start is None or _clearly_later(load, same_start[-1])
        known = None if same_start is None or is_next else _same_load(same_start, load)
        if known is not None:
            self._narrow(known, load)
            return known
        lifetime = Lifetime(load)
        self.index.insert(lifetime)
        if not is_next or start in self._orphans:
            self._pair_anew(lifetime)
        return lifetime

    def unload(self, unload: Unload) -> Lifetime | None:
        """The lifetime this unload ended; None if it matches nothing (yet)."""
        same_start = self.index.starts.get(unload.start)
        lifetime = None if same_start is None else _match(same_start, unload)
        if lifetime is None:
            waiting = self._orphans.setdefault(unload.start, [])
            waiting.append(unload)
            if len(waiting) > _MOST_AT_ONE_START:
                del waiting[0]
            if len(self._orphans) > _MOST_ORPHANS:
                del self._orphans[next(iter(self._orphans))]
            return None
        displaced = _end(lifetime, unload)
        self._redate(lifetime)
        if displaced is not None:
            self._unload_anew(displaced)
        return lifetime

    def _narrow(self, lifetime: Lifetime, load: Load) -> None:
        """Take from a second report of a load what it knows more exactly."""
        self.index.remove(lifetime)
        latest = min(lifetime.loaded_latest, load.latest)
        lifetime.loaded_earliest = min(max(lifetime.loaded_earliest, load.earliest), latest)
        lifetime.loaded_latest = latest
        lifetime.loaded_by = min(lifetime.loaded_by, load.latest)
        lifetime.symbol, lifetime.open_ended = _better_symbol(lifetime, load)
        if lifetime.prog_id is None:
            lifetime.prog_id = load.prog_id
        if lifetime.comm is None:
            lifetime.pid, lifetime.comm = load.pid, load.comm
        if lifetime.functions is None:
            lifetime.functions = load.functions
        self.index.insert(lifetime)
        self._pair_anew(lifetime)

    def _pair_anew(self, lifetime: Lifetime) -> None:
        """Pair a lifetime with unloads that arrived before it, or ended the one before it."""
        start = lifetime.symbol.start
        same_start = self.index.starts[start]
        waiting = self._orphans.pop(start, [])
        at = index_of(same_start, lifetime)
        earlier = same_start[at - 1] if at else None
        taken = None if earlier is None else earlier.unload
        if earlier is not None and taken is not None and taken.latest >= lifetime.loaded_earliest:
            earlier.unloaded_earliest = earlier.unloaded_latest = earlier.unload = None
            self._redate(earlier)
            self.disturbed.append(earlier)
            waiting.append(taken)
        for unload in sorted(waiting, key=lambda waits: waits.latest):
            self._unload_anew(unload)

    def _redate(self, lifetime: Lifetime) -> None:
        """Have the load's window end with the unload: a symbol is loaded before it goes.

        The window of a load that a snapshot found ends when the snapshot is complete. By
        then the symbol may have gone, and another may have its address.
        """
        latest, until = lifetime.loaded_by, lifetime.unloaded_latest
        if until is not None and until < latest:
            latest = until
        if latest != lifetime.loaded_latest:
            self.index.remove(lifetime)
            lifetime.loaded_latest = latest
            self.index.insert(lifetime)

    def _unload_anew(self, unload: Unload) -> None:
        lifetime = self.unload(unload)
        if lifetime is not None:
            self.disturbed.append(lifetime)


def _match(same_start: list[Lifetime], unload: Unload) -> Lifetime | None:
    """The lifetime that an unload ends: the last one surely loaded before it.

    Where windows overlap, the unload may mean either of two symbols that followed each
    other at one start. Then it is that of the first.
    """
    at = loaded_by(same_start, unload.earliest)
    before = same_start[at - 1] if at and _agree(same_start[at - 1], unload) else None
    if before is not None and before.unloaded_latest is None:
        return before
    for lifetime in same_start[at:]:
        if lifetime.loaded_earliest > unload.latest:
            break
        has_id = unload.prog_id is not None and lifetime.prog_id == unload.prog_id
        if has_id or (lifetime.unloaded_latest is None and _agree(lifetime, unload)):
            return lifetime
    # It has ended already: this may be a second report of the same unload.
    known = None if before is None else before.unloaded_latest
    return before if known is not None and unload.earliest <= known else None


def _same_load(same_start: list[Lifetime], load: Load) -> Lifetime | None:
    """The lifetime that an earlier report of this very load began."""
    for lifetime in reversed(same_start):
        if _is_same_load(lifetime, load):
            return lifetime
        if lifetime.loaded_latest < load.earliest:
            break
    return None


def _clearly_later(load: Load, last: Lifetime) -> bool:
    """Whether nothing known at this start can be this load, or be touched by it."""
    earliest = load.earliest
    if last.loaded_latest >= earliest:
        return False
    if last.prog_id is not None and last.prog_id == load.prog_id:
        return False
    return last.unloaded_latest is None or last.unloaded_latest < earliest


def _agree(lifetime: Lifetime, unload: Unload) -> bool:
    """Whether ``unload`` can mean this symbol: by program id, else by name, if known."""
    if lifetime.prog_id is not None and unload.prog_id is not None:
        return lifetime.prog_id == unload.prog_id
    name = lifetime.symbol.name
    if unload.name == name:
        return True
    # Unloads of modules always have a name: one without is of BPF.
    is_bpf = lifetime.symbol.kind != MODULE
    return is_bpf and (unload.name is None or UNNAMED_BPF in (name, unload.name))


def _end(lifetime: Lifetime, unload: Unload) -> Unload | None:
    """End a lifetime, or narrow the window of its end; returns a later unload that it displaces."""
    known, until = lifetime.unloaded_earliest, lifetime.unloaded_latest
    if known is None or until is None or unload.latest < known:
        displaced, lifetime.unload = lifetime.unload, unload
        earliest, since = unload.earliest, lifetime.loaded_earliest
        lifetime.unloaded_earliest = earliest if earliest > since else since
        lifetime.unloaded_latest = unload.latest
        return displaced
    lifetime.unloaded_latest = min(until, unload.latest)
    lifetime.unloaded_earliest = min(max(known, unload.earliest), lifetime.unloaded_latest)
    if lifetime.unload is not None:
        # It may be paired anew: then what both reports knew is needed.
        lifetime.unload = _both(lifetime.unload, unload)
    return None


def _both(one: Unload, other: Unload) -> Unload:
    """Two reports of one unload as one."""
    latest = min(one.latest, other.latest)
    earliest = min(max(one.earliest, other.earliest), latest)
    prog_id = one.prog_id if one.prog_id is not None else other.prog_id
    return Unload(one.start, earliest, latest, one.name or other.name, prog_id)


def _is_same_load(lifetime: Lifetime, load: Load) -> bool:
    if lifetime.prog_id is not None and load.prog_id is not None:
        return lifetime.prog_id == load.prog_id
    if lifetime.unloaded_latest is not None or lifetime.symbol.module != load.symbol.module:
        return False
    name, other = lifetime.symbol.name, load.symbol.name
    if name != other and UNNAMED_BPF not in (name, other):
        return False
    return lifetime.loaded_earliest <= load.latest and load.earliest <= lifetime.loaded_latest


def _better_symbol(lifetime: Lifetime, load: Load) -> tuple[Symbol, bool]:
    """The symbol two reports of one load agree on: a known end, then a known name."""
    old, new = lifetime.symbol, load.symbol
    exact = lifetime if not lifetime.open_ended else load
    named = old if old.name != UNNAMED_BPF else new
    end = exact.symbol.end if not exact.open_ended else min(old.end, new.end)
    return Symbol(old.start, end, named.name, named.kind, named.module), exact.open_ended
