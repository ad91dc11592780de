"""Where lifetimes lie: the address index under the timeline.

It is an interval tree without its pointers. Between a symbol's start and its end lies
one address with more trailing zero bits than any other, its *joint*. All symbols with
the same joint share the byte before it, so none of them was there together with another
and they make one track: whatever the track's length, one binary search finds the one
that can have been there at a time. A symbol is entered once, whatever its size.

An address can be covered from joints at different levels, some ten for symbols of up to
64 KB. Addresses are cut into cells of 64 bytes, the kernel's own grain for BPF text
(BPF_PROG_CHUNK_SIZE in kernel/bpf/core.c), and each cell lists the tracks that reach it:
two or three as a rule. What is wider than 64 KB, as modules are, has tracks of its own,
listed by page: a module of 4 MB would have 65,536 cells.

A symbol whose end is only an upper bound is indexed by its start alone, and by page for
the question which of them might reach an address.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    from ksym_plugin.timeline.symbols import Lifetime


class Track:
    """Lifetimes that share a byte, in load order.

    Each of them took the place of the one before: of those loaded by a given time only
    the last can still be there, and none behind it need be looked at.
    """

    __slots__ = ("blur", "first", "last", "lifetimes", "times")

    def __init__(self, first: int, last: int) -> None:
        #: The cells it is listed in.
        self.first = first
        self.last = last
        #: The ``loaded_latest`` of each of ``lifetimes``.
        self.times: list[int] = []
        self.lifetimes: list[Lifetime] = []
        #: The widest window of a load, in ns; at least 1 where two are of one time.
        self.blur = 0

    def append(self, lifetime: Lifetime) -> None:
        """Take in a lifetime, most often the latest."""
        latest, times = lifetime.loaded_latest, self.times
        width = latest - lifetime.loaded_earliest
        if width > self.blur:  # noqa: PLR1730 - a call costs more, once a load
            self.blur = width
        if not times or latest > times[-1]:
            times.append(latest)
            self.lifetimes.append(lifetime)
            return
        at = position(self.lifetimes, lifetime)
        if latest in times[max(0, at - 1) : at + 1]:
            self.blur = max(self.blur, 1)
        times.insert(at, latest)
        self.lifetimes.insert(at, lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        at = bisect_right(self.times, lifetime.loaded_latest) - 1
        while self.lifetimes[at] is not lifetime:
            at -= 1
        del self.times[at]
        del self.lifetimes[at]


def loaded_by(lifetimes: list[Lifetime], time: int) -> int:
    """How many of ``lifetimes``, which are in load order, were surely loaded by ``time``."""
    low, high = 0, len(lifetimes)
    while low < high:
        middle = (low + high) // 2
        if lifetimes[middle].loaded_latest <= time:
            low = middle + 1
        else:
            high = middle
    return low


def position(lifetimes: list[Lifetime], lifetime: Lifetime) -> int:
    """Where among ``lifetimes``, which are in load order, one more belongs."""
    latest, prog_id = lifetime.loaded_latest, lifetime.prog_id
    at = loaded_by(lifetimes, latest)
    while prog_id is not None and at:
        before = lifetimes[at - 1]
        if before.loaded_latest != latest or (before.prog_id or 0) <= prog_id:
            break
        at -= 1
    return at


def index_of(lifetimes: list[Lifetime], lifetime: Lifetime) -> int:
    """The index of ``lifetime`` itself, which is among them."""
    at = loaded_by(lifetimes, lifetime.loaded_latest) - 1
    while lifetimes[at] is not lifetime:
        at -= 1
    return at


CELL_SHIFT: Final = 6
PAGE_SHIFT: Final = 12
#: Since Linux 5.18 programs are packed into areas of PMD_SIZE (bpf_prog_pack in
#: kernel/bpf/core.c), 2 MB with pages of 4 KB, in which there is nothing else but classic
#: BPF and images. They begin at any page.
GROUND_SHIFT: Final = 21
_PAGE_CELLS: Final = 1 << (PAGE_SHIFT - CELL_SHIFT)
#: Longer symbols than this are wide.
WIDE: Final = 1 << 16


class Places:
    """All lifetimes by start, by joint and by cell; the open-ended ones by page."""

    __slots__ = (
        "_joints",
        "_starts_in",
        "_wide_joints",
        "cells",
        "ground",
        "open_pages",
        "starts",
        "wide",
    )

    def __init__(self) -> None:
        #: Start address to all that ever started there, in load order.
        self.starts: dict[int, list[Lifetime]] = {}
        #: Cell number to the tracks of the joints whose symbols reach into it.
        self.cells: dict[int, list[Track]] = {}
        #: Page number to the tracks of wide symbols.
        self.wide: dict[int, list[Track]] = {}
        #: Page number to the starts of open-ended symbols that may reach into it.
        self.open_pages: dict[int, list[int]] = {}
        #: Numbers of the 2 MB in which BPF symbols started.
        self.ground: set[int] = set()
        #: Of those pages, all starts in them, ascending.
        self._starts_in: dict[int, list[int]] = {}
        self._joints: dict[int, Track] = {}
        self._wide_joints: dict[int, Track] = {}

    def insert(self, lifetime: Lifetime) -> None:
        symbol = lifetime.symbol
        start, end = symbol.start, symbol.end
        place = self.starts.get(start)
        if place is None:
            self.starts[start] = [lifetime]
            if symbol.module == BPF_MODULE:
                self.ground.add(start >> GROUND_SHIFT)
            if self.open_pages:
                self._note_start(start)
        elif not place or lifetime.loaded_latest > place[-1].loaded_latest:
            place.append(lifetime)
        else:
            place.insert(position(place, lifetime), lifetime)
        if lifetime.open_ended:
            self._open(start, end)
            return
        joint, joints, cells, shift = joint_of(start, end), self._joints, self.cells, CELL_SHIFT
        if end - start > WIDE:
            joints, cells, shift = self._wide_joints, self.wide, PAGE_SHIFT
        track = joints.get(joint)
        first, last = start >> shift, (end - 1) >> shift
        if track is None:
            track = joints[joint] = Track(first, first - 1)
        if first < track.first or last > track.last:
            _list(cells, track, first, last)
        track.append(lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        """Take a lifetime out; its times and symbol must still be those it went in with."""
        symbol = lifetime.symbol
        place = self.starts[symbol.start]
        del place[index_of(place, lifetime)]
        if not lifetime.open_ended:
            joints = self._wide_joints if symbol.end - symbol.start > WIDE else self._joints
            joints[joint_of(symbol.start, symbol.end)].remove(lifetime)

    def tracks_at(self, address: int) -> Sequence[Track]:
        """Of all lifetimes over an address the tracks, and maybe of some nearby."""
        tracks = self.cells.get(address >> CELL_SHIFT, ())
        wide = self.wide and self.wide.get(address >> PAGE_SHIFT)
        return (*tracks, *wide) if wide else tracks

    def is_among_bpf(self, address: int) -> bool:
        """Whether a BPF symbol may be in one area with the address: ``GROUND_SHIFT``."""
        number, ground = address >> GROUND_SHIFT, self.ground
        return number in ground or number - 1 in ground or number + 1 in ground

    def starting_between(self, low: int, high: int) -> Iterator[list[Lifetime]]:
        """What started from ``high`` down to ``low``, both inclusive, on pages that are open."""
        for page in range(high >> PAGE_SHIFT, (low >> PAGE_SHIFT) - 1, -1):
            starts = self._starts_in[page]
            within = starts[bisect_left(starts, low) : bisect_right(starts, high)]
            for start in reversed(within):
                yield self.starts[start]

    def _open(self, start: int, end: int) -> None:
        for page in range(start >> PAGE_SHIFT, ((end - 1) >> PAGE_SHIFT) + 1):
            starts = self.open_pages.get(page)
            if starts is None:
                starts = self.open_pages[page] = []
                self._starts_in[page] = self._started_in(page, start)
            if start not in starts:
                starts.append(start)

    def _note_start(self, start: int) -> None:
        starts = self._starts_in.get(start >> PAGE_SHIFT)
        if starts is not None:
            insort(starts, start)

    def _started_in(self, page: int, opener: int) -> list[int]:
        """All starts in a page that the open-ended symbol from ``opener`` is the first to reach."""
        first = page * _PAGE_CELLS
        listed = [self.cells.get(cell, ()) for cell in range(first, first + _PAGE_CELLS)]
        found = {
            lifetime.symbol.start
            for tracks in (*listed, self.wide.get(page, ()))
            for track in tracks
            for lifetime in track.lifetimes
        }
        return sorted(start for start in {opener, *found} if start >> PAGE_SHIFT == page)


def _list(cells: dict[int, list[Track]], track: Track, first: int, last: int) -> None:
    """List a track in all cells from ``first`` to ``last``."""
    for cell in (*range(first, track.first), *range(track.last + 1, last + 1)):
        tracks = cells.get(cell)
        if tracks is None:
            cells[cell] = [track]
        else:
            tracks.append(track)
    track.first = min(first, track.first)
    track.last = max(last, track.last)


def joint_of(start: int, end: int) -> int:
    """The address above ``start``, up to ``end``, with the most trailing zero bits."""
    level = (start ^ end).bit_length() - 1
    return end >> level << level
