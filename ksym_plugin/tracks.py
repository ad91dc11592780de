"""Lifetimes in the order they were loaded: what the address index is made of.

Equal times, as in one drain of several rings, are ordered by program id, which the
kernel hands out in order.
"""

from __future__ import annotations

from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.symbols import Lifetime


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
