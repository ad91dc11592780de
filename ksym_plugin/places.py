"""Where lifetimes lie: the address index under the timeline.

Addresses are cut into cells of 64 bytes, the kernel's own grain for BPF text
(BPF_PROG_CHUNK_SIZE in kernel/bpf/core.c), and cells are grouped into blocks of 256.
A cell knows the *places* in it, each an address at which symbols start, and what runs
*through* it: what started in an earlier cell of its block, and what started in an
earlier block. All are tracks: lifetimes in the order they were loaded.

That suffices to find who sat at an address by one binary search a track, whatever the
track's length. Symbols in one track share a byte (their start, or the first byte of a
cell or block), so each of them took the place of the one before: of those loaded by a
given time only the last can still be there, and none behind it need be looked at.

The kernel places a program at random within its first chunk, so a cell that is used
again and again comes to have many places. Such a *crowded* cell also keeps the order of
all that start there and run on: they share its last byte, so few places matter at once.

A symbol whose end is only an upper bound is indexed at its start alone, and by page
for the question which of them might reach an address.
"""

from __future__ import annotations

from ksym_plugin.tracks import Crowd, Track

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from ksym_plugin.symbols import Lifetime

CELL_SHIFT: Final = 6
PAGE_SHIFT: Final = 12
_BLOCK_SHIFT: Final = 2
_BLOCK_CELLS: Final = 1 << _BLOCK_SHIFT
#: A cell with more tracks than this is crowded.
_CROWD: Final = 5


class Places:
    """All tracks, by start and by cell, and the open-ended ones by page."""

    __slots__ = ("_blocks", "_spans", "_through", "cells", "crowds", "open_pages", "starts")

    def __init__(self) -> None:
        #: Start address to the track of all that ever started there.
        self.starts: dict[int, Track] = {}
        #: Cell number to its tracks; what runs through, if anything does, comes first.
        self.cells: dict[int, list[Track]] = {}
        #: The crowded ones of them.
        self.crowds: dict[int, Crowd] = {}
        #: Page number to the places of open-ended symbols that may reach into it.
        self.open_pages: dict[int, list[Track]] = {}
        #: By first and last cell, what a symbol runs through.
        self._spans: dict[tuple[int, int], list[Track]] = {}
        self._through: dict[int, Track] = {}
        self._blocks: dict[int, Track] = {}

    def insert(self, lifetime: Lifetime) -> None:
        symbol = lifetime.symbol
        start = symbol.start
        place = self.starts.get(start)
        if place is None:
            place = self._found(start)
        latest = lifetime.loaded_latest
        times = place.times
        if times and latest <= times[-1]:
            place.insert(lifetime)
        else:
            times.append(latest)
            place.lifetimes.append(lifetime)
        cell = start >> CELL_SHIFT
        crowd = self.crowds.get(cell)
        if lifetime.open_ended:
            self._open(place, symbol.end)
            if crowd is not None:
                crowd.keep(place)
            return
        last = (symbol.end - 1) >> CELL_SHIFT
        if last == cell:
            if crowd is not None:
                crowd.keep(place)
            return
        if crowd is not None:
            crowd.insert(lifetime)
        span = place.span
        if span is None or place.last != last:
            span = self._span(place, last)
        for track in span:
            times = track.times
            if times and latest <= times[-1]:
                track.insert(lifetime)
            else:
                times.append(latest)
                track.lifetimes.append(lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        """Take a lifetime out; its times and symbol must still be those it went in with."""
        place = self.starts[lifetime.symbol.start]
        place.remove(lifetime)
        if not _runs_on(lifetime):
            return
        for track in self._span(place, (lifetime.symbol.end - 1) >> CELL_SHIFT):
            track.remove(lifetime)
        crowd = self.crowds.get(place.start >> CELL_SHIFT)
        if crowd is not None:
            crowd.order.remove(lifetime)

    def starting_between(self, low: int, high: int) -> Iterator[Track]:
        """The places from ``low`` to ``high``, both inclusive, by cell."""
        for cell in range(low >> CELL_SHIFT, (high >> CELL_SHIFT) + 1):
            for track in self.cells.get(cell, ()):
                if low <= track.start <= high:
                    yield track

    def _found(self, start: int) -> Track:
        """A new place."""
        place = self.starts[start] = Track(start)
        cell = start >> CELL_SHIFT
        tracks = self.cells.get(cell)
        if tracks is None:
            self.cells[cell] = [place]
            return place
        tracks.append(place)
        if len(tracks) > _CROWD and cell not in self.crowds:
            self._crowd(cell)
        return place

    def _crowd(self, cell: int) -> None:
        crowd = self.crowds[cell] = Crowd(self.starts)
        for track in self.cells[cell]:
            if not track.start:
                crowd.always.append(track)
                continue
            for lifetime in track.lifetimes:
                if _runs_on(lifetime):
                    crowd.insert(lifetime)
                else:
                    crowd.keep(track)

    def _span(self, place: Track, last: int) -> list[Track]:
        """The tracks that a symbol from ``place`` to cell ``last`` runs through."""
        key = (place.start >> CELL_SHIFT, last)
        span = self._spans.get(key)
        if span is not None:
            place.last, place.span = last, span
            return span
        first = (place.start >> CELL_SHIFT) + 1
        block = -(-first >> _BLOCK_SHIFT)
        until = min(last + 1, block << _BLOCK_SHIFT)
        span = [self._running_through(cell) for cell in range(first, until)]
        span += [self._block(number, last) for number in range(block, (last >> _BLOCK_SHIFT) + 1)]
        place.last = last
        place.span = self._spans[key] = span
        return span

    def _running_through(self, cell: int) -> Track:
        track = self._through.get(cell)
        if track is None:
            track = self._through[cell] = Track(0)
            self._put_first(cell, track)
        return track

    def _block(self, block: int, last: int) -> Track:
        """What runs through a block, known to its cells up to ``last``."""
        first = block << _BLOCK_SHIFT
        track = self._blocks.get(block)
        if track is None:
            track = self._blocks[block] = Track(0)
            track.last = first - 1
        last = min(last, first + _BLOCK_CELLS - 1)
        if last > track.last:
            for cell in range(track.last + 1, last + 1):
                self._put_first(cell, track)
            track.last = last
        return track

    def _put_first(self, cell: int, track: Track) -> None:
        tracks = self.cells.get(cell)
        if tracks is None:
            self.cells[cell] = [track]
            return
        tracks.insert(0, track)
        crowd = self.crowds.get(cell)
        if crowd is not None:
            crowd.always.insert(0, track)

    def _open(self, place: Track, end: int) -> None:
        for page in range(place.start >> PAGE_SHIFT, ((end - 1) >> PAGE_SHIFT) + 1):
            places = self.open_pages.setdefault(page, [])
            if place not in places:
                places.append(place)


def _runs_on(lifetime: Lifetime) -> bool:
    """Whether it goes on into the cell after its first, as far as is known."""
    symbol = lifetime.symbol
    return not lifetime.open_ended and (symbol.end - 1) >> CELL_SHIFT != symbol.start >> CELL_SHIFT
