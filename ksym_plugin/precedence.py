"""Which of two symbols had a place, going by when they were there: rules of the timeline."""

from __future__ import annotations

from ksym_plugin.symbols import MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.symbols import Lifetime

#: How long after its unload a program is still taken to run: 1.37 s is the longest that
#: was measured. Later its place may be anybody's: classic BPF is JITed unannounced.
_GRACE_SPAN: Final = 2_000_000_000


def grace(lifetime: Lifetime) -> int:
    """For how long a lifetime may still be running after its unload, in ns; no module is."""
    return 0 if lifetime.symbol.kind == MODULE else _GRACE_SPAN


def loaded_after(one: Lifetime, other: Lifetime) -> bool:
    """Whether ``one`` took the place; of one load's symbols the nearer start wins."""
    if one.loaded_latest != other.loaded_latest:
        return one.loaded_latest > other.loaded_latest
    if one.prog_id != other.prog_id and one.prog_id is not None and other.prog_id is not None:
        return one.prog_id > other.prog_id
    until, till = one.unloaded_latest, other.unloaded_latest
    if until != till:
        # Reported at once, but they cannot have shared a byte: one left before the other.
        return until is None or (till is not None and until > till)
    return one.symbol.start > other.symbol.start


def is_over(other: Lifetime, lifetime: Lifetime) -> bool:
    """Whether ``other`` began below ``lifetime`` and was loaded over the start of it."""
    start = lifetime.symbol.start
    return other.symbol.start < start < other.symbol.end and loaded_after(other, lifetime)


def are_tied(one: Lifetime, other: Lifetime) -> bool:
    """Whether both came and went between two reads: which was the last nobody knows."""
    if one.loaded_latest != other.loaded_latest or one.unloaded_latest is None:
        return False
    if one.prog_id is not None and other.prog_id is not None:
        return False
    return one.unloaded_latest == other.unloaded_latest


def outranks(image: Lifetime, holder: Lifetime, time: int) -> bool | None:
    """Whether an image has an address that ``holder`` covers too; None if none can tell."""
    if holder.symbol.start <= image.symbol.start:
        return loaded_after(image, holder)
    unloaded = holder.unloaded_latest
    if unloaded is None or coexisted(holder, image):
        return False
    return None if time - unloaded < grace(holder) else True


def coexisted(one: Lifetime, image: Lifetime) -> bool:
    """Whether ``one`` was surely there at some time since ``image`` was loaded."""
    since = one.unloaded_earliest
    return since is None or since > image.loaded_latest
