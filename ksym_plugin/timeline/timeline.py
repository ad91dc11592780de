"""Who had a kernel address, and from when to when.

The timeline keeps lifetimes as they were reported, and nothing derived from them. Who had an
address at a time is worked out when asked, by one rule: **the last symbol loaded over an
address has it**, until another is loaded over it. So a symbol whose unload was lost ends where
the next one begins, no two symbols share an address, and changes may be applied in any order.

For 2 s after its unload a symbol still has its addresses (GRACE), as it may still be running,
until any of them is another's. Nothing runs in a module that has gone.

A symbol whose end is only an upper bound (``open_ended``) ends at the latest before the start
of everything that was there at the same time.

Applying a change costs a few list appends (``pairing``). A look-up costs one binary search
for each bucket of a 64-byte chunk (``index``). Neither grows with the history.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ksym_plugin.timeline.index import CHUNK_SHIFT, PAGE_SHIFT, AddressIndex, loaded_by
from ksym_plugin.timeline.pairing import Pairing
from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    EXACT,
    GAP,
    GRACE,
    LOST,
    MODULE,
    NOT_LOADED,
    UNKNOWN_ADDRESS,
    VACANT,
    Load,
    Loss,
    Reason,
    Unload,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Union

    from ksym_plugin.timeline.index import Bucket
    from ksym_plugin.timeline.symbols import Lifetime

    #: A lifetime and how certain it is, or None and why there is none.
    Answer = Union[tuple[Lifetime, str], tuple[None, Reason]]

#: How long after its unload a program may still be running: 1.37 s is the longest that
#: was measured. Later anything may be at its address: classic BPF is JITed unannounced.
_GRACE_SPAN = 2_000_000_000
#: How many lifetimes that may have been loaded already are looked at in a bucket.
_MOST_RIVALS = 16
#: Of what is longer than this no grace is known: each of its chunks would be looked at.
_LONGEST_GRACE = 1 << 20


def grace(lifetime: Lifetime) -> int:
    """For how many ns after its unload a symbol may still be running."""
    return 0 if lifetime.symbol.kind == MODULE else _GRACE_SPAN


def loaded_after(one: Lifetime, other: Lifetime) -> bool:
    """Whether ``one`` replaced ``other``; of one load's symbols the nearer start wins."""
    if one.loaded_latest != other.loaded_latest:
        return one.loaded_latest > other.loaded_latest
    if one.prog_id != other.prog_id and one.prog_id is not None and other.prog_id is not None:
        return one.prog_id > other.prog_id
    until, till = one.unloaded_latest, other.unloaded_latest
    if until != till:
        # Reported at once, but they cannot have shared a byte: one left before the other.
        return until is None or (till is not None and until > till)
    return one.symbol.start > other.symbol.start


def are_tied(one: Lifetime, other: Lifetime) -> bool:
    """Whether both came and went between two reads: then their order is not known."""
    if one.loaded_latest != other.loaded_latest or one.unloaded_latest is None:
        return False
    if one.prog_id is not None and other.prog_id is not None:
        return False
    return one.unloaded_latest == other.unloaded_latest


def outranks(image: Lifetime, other: Lifetime, time: int) -> bool | None:
    """Whether an image has an address that ``other`` covers too; None if that is not known."""
    if other.symbol.start <= image.symbol.start:
        return loaded_after(image, other)
    unloaded = other.unloaded_latest
    if unloaded is None or coexisted(other, image):
        return False
    return None if time - unloaded < grace(other) else True


def coexisted(one: Lifetime, image: Lifetime) -> bool:
    """Whether ``one`` was surely there at some time since ``image`` was loaded."""
    since = one.unloaded_earliest
    return since is None or since > image.loaded_latest


class Timeline:
    """Lifetimes of symbols, by address and time.

    Not safe for use from several threads at once; its owner holds a lock.
    """

    #: Whether modules are applied to it; then no other table of them is of use.
    has_modules = False
    #: How many NUMA nodes the kernel can have: see ``AREA_SHIFT``.
    nodes = 1

    def __init__(self) -> None:
        self._extent_before = 0
        self._begin()
        self._gap_starts: list[int] = []
        self._gap_ends: list[int] = []

    def _begin(self) -> None:
        self._index = AddressIndex()
        self._pairing = Pairing(self._index)
        # Look-ups are the hot path: one attribute less to walk.
        self._by_chunk = self._index.by_chunk
        self._by_page = self._index.by_page
        self._starts = self._index.starts

    @property
    def count(self) -> int:
        """The number of lifetimes, ended ones included."""
        return self._index.count

    @property
    def extent(self) -> int:
        """Grows when symbols come where none was: then a cached miss is no longer valid."""
        return self._extent_before + len(self._by_chunk) + len(self._by_page)

    def apply(self, change: Load | Unload | Loss) -> Lifetime | None:
        """Take in one change; the lifetime it began, ended or narrowed, if any.

        An unload that matches nothing changes nothing, unless its load arrives later.
        A symbol of no length (a program that was not JITed) covers nothing.
        """
        if isinstance(change, Load):
            return self._pairing.load(change)
        if isinstance(change, Unload):
            return self._pairing.unload(change)
        self._add_gap(change.since, change.until)
        return None

    def take_disturbed(self) -> list[Lifetime]:
        """What late reports changed besides what ``apply`` returned, since the last call."""
        disturbed, self._pairing.disturbed = self._pairing.disturbed, []
        return disturbed

    def enter(self, lifetime: Lifetime) -> None:
        """Take in a whole lifetime, as a history has it."""
        self._index.insert(lifetime)

    def at(self, address: int, time: int) -> Answer:
        """Who had ``address`` at ``time`` (CLOCK_MONOTONIC ns), and how certain that is.

        AMBIGUOUS where the time falls into the window in which one symbol followed
        another and their names differ.
        """
        best: Lifetime | None = None
        loaded = -1
        buckets: Sequence[Bucket] = self._by_chunk.get(address >> CHUNK_SHIFT, ())
        if self._by_page:
            buckets = (*buckets, *self._by_page.get(address >> PAGE_SHIFT, ()))
        for bucket in buckets:
            if bucket.widest_window:
                return self._weigh(address, time)
            times = bucket.times
            at = bisect_right(times, time)
            if at and times[at - 1] >= loaded:
                lifetime = bucket.lifetimes[at - 1]
                symbol = lifetime.symbol
                if symbol.start <= address < symbol.end:
                    if times[at - 1] == loaded:
                        return self._weigh(address, time)
                    best, loaded = lifetime, times[at - 1]
        if best is not None:
            until = best.unloaded_earliest
            if until is not None and time > until:
                if not self._has_left(best, address, time):
                    return self._hit(best, time)
            elif until is not None or not self._is_overrun(best, time):
                return self._hit(best, time) if self._gap_ends else (best, EXACT)
        return self._miss(address, bool(buckets), time)

    def names_since(self, address: int, since: int) -> set[str]:
        """The names of all that had ``address`` at any time since, or may have run there still."""
        names = set()
        for bucket in self._index.buckets_at(address):
            for lifetime in reversed(bucket.lifetimes):
                symbol, ended = lifetime.symbol, lifetime.unloaded_latest
                may_run = ended is None or ended + grace(lifetime) >= since
                if may_run and symbol.start <= address < symbol.end:
                    names.add(symbol.name)
                if lifetime.loaded_latest <= since:
                    # It had replaced all that came before.
                    break
        return names

    def started_at(self, start: int) -> list[Lifetime]:
        """All lifetimes that began at an address, by load."""
        return self._starts.get(start, [])

    def open(self) -> list[Lifetime]:
        """All whose end was not reported, also where another was loaded over them since."""
        last = [same_start[-1] for same_start in self._starts.values()]
        return [lifetime for lifetime in last if lifetime.unloaded_latest is None]

    def live(self) -> list[Lifetime]:
        """The lifetimes that have not ended, by start."""
        live: list[Lifetime] = []
        above: list[Lifetime] = []
        for lifetime in sorted(self.open(), key=lambda life: life.symbol.start):
            above = [other for other in above if other.symbol.end > lifetime.symbol.start]
            # A symbol loaded later over this one's start has ended it, reported or not.
            if any(loaded_after(other, lifetime) for other in above):
                continue
            live.append(lifetime)
            if not lifetime.open_ended:
                above.append(lifetime)
        return live

    def lifetimes(self) -> list[Lifetime]:
        """All lifetimes, by start and load."""
        return [lifetime for start in sorted(self._starts) for lifetime in self._starts[start]]

    def expire(self, before: int) -> None:
        """Drop lifetimes that ended before ``before``, for a recorder that runs for long."""
        remaining = [one for one in self.lifetimes() if not self._ended_by(one, before)]
        self._extent_before = self.extent
        self._begin()
        for lifetime in remaining:
            self._index.insert(lifetime)

    def _ended_by(self, lifetime: Lifetime, time: int) -> bool:
        """Whether it ended before ``time``: where its unload was lost, by what came over it."""
        ended, start = lifetime.unloaded_latest, lifetime.symbol.start
        if ended is not None:
            return ended < time
        end = start + 1 if lifetime.open_ended else lifetime.symbol.end
        for bucket in self._index.buckets_between(start, end):
            first = bisect_left(bucket.times, lifetime.loaded_latest)
            for other in bucket.lifetimes[first : bisect_left(bucket.times, time)]:
                symbol = other.symbol
                # How far one without a known end reaches is not known.
                is_over = symbol.start < end and start < symbol.end
                is_over = is_over and not (other.open_ended and symbol.start < start)
                if is_over and loaded_after(other, lifetime):
                    return True
        return False

    def lost_between(self, since: int, until: int) -> bool:
        """Whether changes may have been lost at any time from ``since`` to ``until``."""
        at = bisect_right(self._gap_ends, since - 1)
        return at < len(self._gap_starts) and self._gap_starts[at] <= until

    def _add_gap(self, since: int, until: int) -> None:
        """Keep the gaps sorted and apart, so that one binary search finds an overlap."""
        low = bisect_right(self._gap_ends, since - 1)
        high = bisect_right(self._gap_starts, until)
        if low < high:
            since = min(since, self._gap_starts[low])
            until = max(until, self._gap_ends[high - 1])
        self._gap_starts[low:high] = [since]
        self._gap_ends[low:high] = [until]

    def _weigh(self, address: int, time: int) -> Answer:
        """``at`` where windows, ties or symbols without a known end have to be weighed."""
        best: Lifetime | None = None
        rivals: list[Lifetime] = []
        images: list[Lifetime] = []
        buckets = self._index.buckets_at(address)
        for bucket in buckets:
            times = bucket.times
            at = bisect_right(times, time)
            if at < len(times) and times[at] - bucket.widest_window <= time:
                rivals += _possible(bucket.lifetimes[at : at + _MOST_RIVALS], address, time)
            for lifetime in _last_covering(bucket, at, address):
                if lifetime.open_ended:
                    images.append(lifetime)
                elif best is not None and are_tied(lifetime, best):
                    rivals.append(lifetime)
                elif best is None or loaded_after(lifetime, best):
                    best = lifetime
        if best is not None and self._has_left(best, address, time):
            best = None
        for image in sorted(images, key=lambda life: life.symbol.start, reverse=True):
            if not self._reaches(image, address, time) or self._has_left(image, address, time):
                continue
            is_newer = best is None or outranks(image, best, time)
            if is_newer is None:
                return None, AMBIGUOUS
            best = image if is_newer else best
        rivals = [one for one in rivals if self._reaches(one, address, time)]
        return self._settle(address, best, rivals, time, bool(buckets))

    def _hit(self, lifetime: Lifetime, time: int) -> Answer:
        """The answer where ``lifetime`` was the last to have the address."""
        unloaded = lifetime.unloaded_latest
        if unloaded is None or time <= unloaded:
            return lifetime, GAP if self._gap_ends and self.lost_between(time, time) else EXACT
        # What came and went in a gap since the unload could have used the address.
        since = lifetime.unloaded_earliest
        if self._gap_ends and self.lost_between(unloaded if since is None else since, time):
            return lifetime, GAP
        return lifetime, GRACE

    def _miss(self, address: int, was_used: bool, time: int) -> Answer:
        """The answer where nothing had the address; ``was_used`` if something nearby ever did."""
        if self._gap_ends and self.lost_between(time, time):
            return None, LOST
        is_among_bpf = self._index.is_among_bpf(address, self.nodes)
        if was_used:
            return None, NOT_LOADED if is_among_bpf else VACANT
        return None, AMONG_BPF if is_among_bpf else UNKNOWN_ADDRESS

    def _settle(
        self, address: int, best: Lifetime | None, rivals: list[Lifetime], time: int, was_used: bool
    ) -> Answer:
        """Decide between the symbol that was there and those that may have come already."""
        if best is not None and not rivals:
            return self._hit(best, time)
        ended = None if best is None else best.unloaded_earliest
        if ended is not None and time < ended:
            # Whoever came after its end was not there yet.
            rivals = [rival for rival in rivals if rival.loaded_latest < ended]
        candidates = [
            one
            for one in (rivals if best is None else [best, *rivals])
            if not self._has_ended(one, one.symbol.end, time)
        ]
        if not candidates:
            return self._miss(address, was_used, time)
        if len({(one.symbol.start, one.symbol.name) for one in candidates}) > 1:
            return None, AMBIGUOUS
        # All of one name: the one that lasts longest says how certain it is.
        longest = max(
            candidates, key=lambda one: (one.unloaded_latest is None, one.unloaded_latest or 0)
        )
        return self._hit(longest, time)

    def _has_left(self, lifetime: Lifetime, address: int, time: int) -> bool:
        """Whether a lifetime no longer owns ``address`` at ``time``."""
        # How far one without a known end reached is not known: as far as is asked for.
        end = address + 1 if lifetime.open_ended else lifetime.symbol.end
        return self._has_ended(lifetime, end, time) or self._is_overrun(lifetime, time)

    def _is_overrun(self, lifetime: Lifetime, time: int) -> bool:
        """Whether something was loaded over a symbol's start: then it owns nothing any more."""
        start, loaded = lifetime.symbol.start, lifetime.loaded_latest
        same_start = self._starts[start]
        is_last = same_start[-1] is lifetime
        if not is_last and same_start[loaded_by(same_start, time) - 1] is not lifetime:
            return True
        for bucket in self._index.buckets_at(start):
            times = bucket.times
            if not times or times[-1] < loaded or bucket.lifetimes[-1] is lifetime:
                continue
            at = bisect_right(times, time)
            other = bucket.lifetimes[at - 1]
            is_over = other.symbol.start < start < other.symbol.end and not other.open_ended
            if at and is_over and loaded_after(other, lifetime):
                return True
        return False

    def _has_ended(self, lifetime: Lifetime, end: int, time: int) -> bool:
        """Whether one that has ended is not in its grace, or a byte before ``end`` is another's."""
        ended = lifetime.unloaded_latest
        if ended is None or time <= ended:
            return False
        if time - ended > grace(lifetime) or end - lifetime.symbol.start > _LONGEST_GRACE:
            return True
        return self._was_taken(lifetime, end, time)

    def _was_taken(self, lifetime: Lifetime, end: int, time: int) -> bool:
        """Whether a later symbol has had a byte before ``end`` of one that has ended.

        Where very many followed, this is assumed: a symbol that has ended is only an answer
        because it may still run.
        """
        start, since = lifetime.symbol.start, lifetime.unloaded_earliest or 0
        for bucket in self._index.buckets_between(start, end):
            last = bisect_right(bucket.times, time)
            first = max(last - _MOST_RIVALS, 0)
            for other in reversed(bucket.lifetimes[first:last]):
                symbol = other.symbol
                # How far one without a known end reaches is not known.
                is_below = other.open_ended and symbol.start < start
                if is_below or other.loaded_latest < since:
                    break
                if symbol.start < end and start < symbol.end and loaded_after(other, lifetime):
                    return True
            else:
                if first:
                    return True
        return False

    def _reaches(self, image: Lifetime, address: int, time: int) -> bool:
        """Whether a symbol over ``address`` by its report can extend to it."""
        if not image.open_ended:
            return True
        for same_start in self._index.starting_between(image.symbol.start + 1, address):
            at = loaded_by(same_start, time)
            if at and coexisted(same_start[at - 1], image):
                return False
        return True


def _last_covering(bucket: Bucket, at: int, address: int) -> list[Lifetime]:
    """The last of a bucket's first ``at`` lifetimes, or all of its time, if over ``address``."""
    last: list[Lifetime] = []
    times = bucket.times
    while at and (not last or times[at - 1] == last[0].loaded_latest):
        at -= 1
        last.append(bucket.lifetimes[at])
    return [one for one in last if one.symbol.start <= address < one.symbol.end]


def _possible(following: list[Lifetime], address: int, time: int) -> list[Lifetime]:
    """Which of the lifetimes surely loaded after ``time`` may have been loaded by then."""
    return [
        lifetime
        for lifetime in following
        if lifetime.loaded_earliest <= time
        and lifetime.symbol.start <= address < lifetime.symbol.end
    ]
