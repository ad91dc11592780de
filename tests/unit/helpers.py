"""Shorthand for changes, and a kernel small enough to be believed.

``Held`` and ``histories`` are the oracle of the timeline's and the history's tests: a
plain list of who held which bytes from when to when, made by rules of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from ksym_plugin.timeline.symbols import BPF_PROG, Lifetime, Load, Reason, Symbol, Unload, bpf_kind
from ksym_plugin.timeline.timeline import Timeline

BASE = 0xFFFF_FFFF_C010_0000
#: What an EXACT or GRACE answer is compared by: start, name, loaded, unloaded, certainty.
Row = tuple


def load(
    start: int,
    size: int,
    name: str,
    time: int | tuple[int, int],
    prog_id: int | None = None,
    open_ended: bool = False,
) -> Load:
    """A load at an exact time or in a window."""
    earliest, latest = time if isinstance(time, tuple) else (time, time)
    kind = bpf_kind(name) if open_ended else BPF_PROG
    symbol = Symbol(start, start + size, name, kind, "[bpf]")
    return Load(symbol, earliest, latest, prog_id, open_ended)


def unload(
    start: int,
    time: int | tuple[int, int],
    name: str | None = None,
    prog_id: int | None = None,
) -> Unload:
    earliest, latest = time if isinstance(time, tuple) else (time, time)
    return Unload(start, earliest, latest, name, prog_id)


def timeline_of(*changes: object) -> Timeline:
    timeline = Timeline()
    for change in changes:
        timeline.apply(change)  # type: ignore[arg-type]
    return timeline


def told(answer: tuple) -> object:
    """An answer as ``name certainty``, or the reason itself."""
    lifetime, said = answer
    if lifetime is None:
        assert isinstance(said, Reason)
        return said
    return f"{lifetime.symbol.name} {said}"


def row_of(lifetime: Lifetime) -> Row:
    symbol = lifetime.symbol
    loaded = (lifetime.loaded_earliest, lifetime.loaded_latest)
    unloaded = (lifetime.unloaded_earliest, lifetime.unloaded_latest)
    return (symbol.start, symbol.end, symbol.name, loaded, unloaded, lifetime.prog_id)


class Held(NamedTuple):
    """Bytes ``start`` to ``end`` belonged to ``name`` from ``loaded`` to ``unloaded``.

    ``reported_end`` is what the kernel says of an image; ``end`` is the truth.
    """

    start: int
    end: int
    name: str
    loaded: int
    unloaded: int | None
    prog_id: int | None
    reported_end: int

    @property
    def is_image(self) -> bool:
        return self.end != self.reported_end

    def load(self) -> Load:
        size = self.reported_end - self.start
        return load(self.start, size, self.name, self.loaded, self.prog_id, self.is_image)

    def unload(self, with_name: bool = True) -> Unload:
        assert self.unloaded is not None
        name = self.name if with_name else None
        return unload(self.start, self.unloaded, name, self.prog_id if with_name else None)

    def holds(self, address: int, time: int) -> bool:
        """Whether it was there, from its load on and before its unload."""
        ended = self.unloaded is not None and time >= self.unloaded
        return self.start <= address < self.end and self.loaded <= time and not ended

    def overlaps(self, other: Held) -> bool:
        return self.start < other.end and other.start < self.end


_STEP = st.tuples(
    st.sampled_from([0xE00, 0xE40, 0xE7C, 0xEC0, 0xF00, 0xF10, 0xFC0, 0xFFC, 0x1000, 0x1040]),
    st.sampled_from([4, 20, 64, 100, 200, 700, 5000]),
    st.integers(0, 3),  # name
    st.sampled_from([1, 7, 3_000_000_000]),  # time since the step before
    st.sampled_from(["load", "load", "unload", "image"]),
)


@st.composite
def histories(draw: st.DrawFn, images: bool = False, most: int = 14) -> list[Held]:
    """What a kernel held, one after another: never two symbols on one byte."""
    with_ids = draw(st.booleans())
    held: list[Held] = []
    now = 100
    for number, (offset, size, name, gap, what) in enumerate(draw(st.lists(_STEP, max_size=most))):
        start = BASE + offset
        is_image = what == "image" and images
        size = min(size, 700) if is_image else size
        fresh = Held(
            start,
            start + size,
            f"bpf_trampoline_{name}" if is_image else f"bpf_prog_{name:016x}_p",
            0,
            None,
            number if with_ids and not is_image else None,
            start + (4096 if is_image else size),
        )
        for at, other in enumerate(held):
            if other.unloaded is None and other.overlaps(fresh):
                now += gap
                held[at] = other._replace(unloaded=now)
        if what != "unload":
            now += gap
            held.append(fresh._replace(loaded=now))
    return held


def changes_of(held: list[Held], with_names: bool = True) -> list[Load | Unload]:
    """All reports of a history, with exact times, in the order they happened."""
    changes: list[tuple[int, Load | Unload]] = []
    for one in held:
        changes.append((one.loaded, one.load()))
        if one.unloaded is not None:
            changes.append((one.unloaded, one.unload(with_names)))
    return [change for _, change in sorted(changes, key=lambda pair: pair[0])]


def questions(held: list[Held]) -> list[tuple[int, int]]:
    """Addresses and times at and around every border of a history."""
    edges = {edge for one in held for edge in (one.start, one.end)}
    addresses = sorted({edge + step for edge in edges for step in (-1, 0, 1)})
    instants = {one.loaded for one in held} | {one.unloaded or 0 for one in held}
    times = sorted({instant + step for instant in instants for step in (-1, 0, 1)})
    return [(address, time) for address in addresses for time in times]
