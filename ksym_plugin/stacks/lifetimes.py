"""What is known of a BPF program, in words."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.symbols import Lifetime


def told(lifetime: Lifetime) -> str:
    """Which program it is, who loaded it, and how long it was there."""
    known = [
        "program unknown" if lifetime.prog_id is None else f"program {lifetime.prog_id}",
        f"loaded by {loader(lifetime.pid, lifetime.comm)}",
        lived(shortest(lifetime), longest(lifetime)),
    ]
    return ", ".join(part for part in known if not part.endswith(" -"))


def loader(pid: int | None, comm: str | None) -> str:
    """The task that loaded a program; a dash if nobody saw it."""
    if pid is None and not comm:
        return "-"
    return (comm or "?") + ("" if pid is None else f" (pid {pid})")


def shortest(lifetime: Lifetime) -> int | None:
    """The ns that it was there for at the least; None while it is."""
    if lifetime.unloaded_earliest is None:
        return None
    return max(0, lifetime.unloaded_earliest - lifetime.loaded_latest)


def longest(lifetime: Lifetime) -> int | None:
    """The ns that it was there for at the most; None while it is, or if nobody saw it load."""
    if lifetime.unloaded_latest is None or lifetime.loaded_earliest <= 0:
        return None
    return lifetime.unloaded_latest - lifetime.loaded_earliest


def lived(least: int | None, most: int | None) -> str:
    """How long something was there, between two bounds; in words if it still is."""
    if least is None:
        return "still loaded"
    if most is None:
        return f"over {duration(least)}"
    low, high = duration(least), duration(most)
    if not least:
        return f"under {high}"
    return low if low == high else f"{low} to {high}"


def duration(nanoseconds: int) -> str:
    """A time with three digits at the most, and its unit."""
    value = float(nanoseconds)
    for unit, next_unit in (("ns", 1e3), ("µs", 1e3), ("ms", 1e3), ("s", 60.0), ("min", 60.0)):
        if value < next_unit:
            return f"{value:.3g} {unit}"
        value /= next_unit
    return f"{value:,.1f} h"
