"""Lifetimes in the order they were loaded: what the address index is made of.

Symbols in one track share a byte, so each of them took the place of the one before: of
those loaded by a given time only the last can still be there, and none behind it need
be looked at.
"""

from __future__ import annotations

from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.symbols import Lifetime

#: So many lifetimes of a crowded cell are looked at to find out which places matter.
_MOST_STEPS: Final = 16


class Track:
    """Lifetimes that share a byte, in load order.

    ``times[i]`` is ``lifetimes[i].loaded_latest``. Equal times, as in one drain of
    several rings, are ordered by program id, which the kernel hands out in order.
    ``start`` is the lowest address the track answers for: the place, or 0 for what
    runs through a cell.
    """

    __slots__ = ("last", "lifetimes", "span", "start", "times")

    def __init__(self, start: int) -> None:
        self.start = start
        self.times: list[int] = []
        self.lifetimes: list[Lifetime] = []
        #: For a place: the tracks that a symbol runs through whose last cell is ``last``,
        #: which was that of the last one asked for. For a block: its last cell in use.
        self.last = -1
        self.span: list[Track] | None = None

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


class Crowd:
    """A cell with many places: which of its tracks matter to an address at a time.

    ``order`` holds all that start in the cell and run on into the next: they share the
    cell's last byte. ``always`` are the tracks to look at in any case: what runs through,
    and the places where something else started too.
    """

    __slots__ = ("_inner", "_starts", "_widest", "always", "order")

    def __init__(self, starts: dict[int, Track]) -> None:
        self.order = Track(0)
        self.always: list[Track] = []
        self._inner: set[int] = set()
        self._starts = starts
        self._widest = 0

    def insert(self, lifetime: Lifetime) -> None:
        self.order.insert(lifetime)
        width = lifetime.loaded_latest - lifetime.loaded_earliest
        if width > self._widest:  # noqa: PLR1730 - a call costs more, once a load
            self._widest = width

    def keep(self, place: Track) -> None:
        """Something started at this place that does not run on."""
        if place.start not in self._inner:
            self._inner.add(place.start)
            self.always.append(place)

    def tracks(self, address: int, time: int, floor: int) -> list[Track] | None:
        """The tracks that matter; None if that cannot be told in a few steps.

        What was loaded before ``floor`` does not. Of the places in ``order`` only that
        of the last loaded at or below the address does, those of others reported at the
        same time, and those of what may have been loaded already.
        """
        times, lifetimes, starts = self.order.times, self.order.lifetimes, self._starts
        tracks = list(self.always)
        at = ahead = bisect_right(times, time)
        limit = time + self._widest
        while ahead < len(times) and times[ahead] <= limit:
            if ahead - at == _MOST_STEPS:
                return None
            place = starts[lifetimes[ahead].symbol.start]
            if place not in tracks:
                tracks.append(place)
            ahead += 1
        for back in range(at - 1, max(-1, at - 1 - _MOST_STEPS), -1):
            if times[back] < floor:
                return tracks
            start = lifetimes[back].symbol.start
            if start <= address:
                place = starts[start]
                if place not in tracks:
                    tracks.append(place)
                if start not in self._inner:
                    floor = times[back]
        return tracks if at <= _MOST_STEPS else None

    def last_through(self, address: int, time: int) -> int:
        """When the last that runs through the cell and covers the address was loaded."""
        last = -1
        for track in self.always:
            at = 0 if track.start else bisect_right(track.times, time)
            if at and track.times[at - 1] > last and track.lifetimes[at - 1].symbol.end > address:
                last = track.times[at - 1]
        return last
