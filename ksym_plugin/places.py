"""Where lifetimes lie: the address index under the timeline.

Addresses are cut into cells of 64 bytes, the kernel's own grain for BPF text
(BPF_PROG_CHUNK_SIZE in kernel/bpf/core.c). A cell knows two things: the *places* in
it, each an address at which symbols start, and what runs *through* it, having started
in an earlier cell. Both are tracks: lifetimes in the order they were loaded.

That suffices to find who sat at an address by one binary search a track, whatever the
track's length. Symbols in one track share a byte (their start, or the cell's first
byte), so each of them took the place of the one before: of those loaded by a given
time only the last can still be there, and none behind it need be looked at.

A symbol whose end is only an upper bound is indexed at its start alone, and by page
for the question which of them might reach an address.
"""

from __future__ import annotations

from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from ksym_plugin.symbols import Lifetime

CELL_SHIFT: Final = 6
PAGE_SHIFT: Final = 12


class Track:
    """Lifetimes that share a byte, in load order.

    ``times[i]`` is ``lifetimes[i].loaded_latest``. Equal times, as in one drain of
    several rings, are ordered by program id, which the kernel hands out in order.
    ``start`` is the lowest address the track answers for: the place, or 0 for what
    runs through a cell.
    """

    __slots__ = ("lifetimes", "spans", "start", "times")

    def __init__(self, start: int) -> None:
        self.start = start
        #: For a place: last cell of a symbol to the tracks it runs through.
        self.spans: dict[int, list[Track]] = {}
        self.times: list[int] = []
        self.lifetimes: list[Lifetime] = []

    def insert(self, lifetime: Lifetime) -> None:
        latest = lifetime.loaded_latest
        times = self.times
        if not times or latest > times[-1]:
            times.append(latest)
            self.lifetimes.append(lifetime)
            return
        at = bisect_right(times, latest)
        prog_id = lifetime.prog_id
        if prog_id is not None:
            while at and times[at - 1] == latest and _has_later_id(self.lifetimes[at - 1], prog_id):
                at -= 1
        times.insert(at, latest)
        self.lifetimes.insert(at, lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        at = self._index(lifetime)
        del self.times[at]
        del self.lifetimes[at]

    def before(self, lifetime: Lifetime) -> Lifetime | None:
        """The lifetime loaded just before this one."""
        at = self._index(lifetime)
        return self.lifetimes[at - 1] if at else None

    def _index(self, lifetime: Lifetime) -> int:
        at = bisect_right(self.times, lifetime.loaded_latest) - 1
        while self.lifetimes[at] is not lifetime:
            at -= 1
        return at


def _has_later_id(lifetime: Lifetime, prog_id: int) -> bool:
    return lifetime.prog_id is not None and lifetime.prog_id > prog_id


class Places:
    """All tracks, by start and by cell, and the open-ended ones by page."""

    __slots__ = ("cells", "open_pages", "starts")

    def __init__(self) -> None:
        #: Start address to the track of all that ever started there.
        self.starts: dict[int, Track] = {}
        #: Cell number to its tracks; what runs through, if anything does, comes first.
        self.cells: dict[int, list[Track]] = {}
        #: Page number to the places of open-ended symbols that may reach into it.
        self.open_pages: dict[int, list[Track]] = {}

    def insert(self, lifetime: Lifetime) -> None:
        symbol = lifetime.symbol
        start = symbol.start
        place = self.starts.get(start)
        if place is None:
            place = self.starts[start] = Track(start)
            self.cells.setdefault(start >> CELL_SHIFT, []).append(place)
        place.insert(lifetime)
        if lifetime.open_ended:
            self._open(place, symbol.end)
            return
        last = (symbol.end - 1) >> CELL_SHIFT
        if last == start >> CELL_SHIFT:
            return
        latest = lifetime.loaded_latest
        for track in place.spans.get(last) or self._span(place, last):
            times = track.times
            if times and latest <= times[-1]:
                track.insert(lifetime)
            else:
                times.append(latest)
                track.lifetimes.append(lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        """Take a lifetime out; its times and symbol must still be those it went in with."""
        symbol = lifetime.symbol
        self.starts[symbol.start].remove(lifetime)
        if lifetime.open_ended:
            return
        for track in self._span(self.starts[symbol.start], (symbol.end - 1) >> CELL_SHIFT):
            track.remove(lifetime)

    def starting_between(self, low: int, high: int) -> Iterator[Track]:
        """The places from ``low`` to ``high``, both inclusive, by cell."""
        for cell in range(low >> CELL_SHIFT, (high >> CELL_SHIFT) + 1):
            for track in self.cells.get(cell, ()):
                if low <= track.start <= high:
                    yield track

    def _span(self, place: Track, last: int) -> list[Track]:
        span = place.spans.get(last)
        if span is None:
            first = (place.start >> CELL_SHIFT) + 1
            span = place.spans[last] = [self._through(cell) for cell in range(first, last + 1)]
        return span

    def _through(self, cell: int) -> Track:
        tracks = self.cells.get(cell)
        if tracks is None:
            tracks = self.cells[cell] = [Track(0)]
        elif tracks[0].start:
            tracks.insert(0, Track(0))
        return tracks[0]

    def _open(self, place: Track, end: int) -> None:
        for page in range(place.start >> PAGE_SHIFT, ((end - 1) >> PAGE_SHIFT) + 1):
            places = self.open_pages.setdefault(page, [])
            if place not in places:
                places.append(place)
