"""Who sat at a kernel address, and from when to when.

The timeline keeps what was reported and nothing derived from it: lifetimes, each with
its load and unload. Who sat at an address at a given time is worked out when asked, by
one rule: **the last symbol loaded over an address has it**, until another is loaded
over it. So a symbol whose unload was lost ends where the next one begins, an address
after the unload answers for 2 s with the symbol that may be running there (GRACE), two
symbols never share an address, and changes may be applied in any order. Nothing runs in
a module that has gone: it has no such grace.

A symbol whose end is only an upper bound (``open_ended``) has an address by that rule
only if it can reach it: its true end lies before the start of everything that was
there at the same time.

Cost: applying a change is a few list appends (``ledger``), a look-up one binary search
for each track of a 64-byte cell (``places``). Neither grows with the history.
"""

from __future__ import annotations

from bisect import bisect_right

from ksym_plugin.timeline.index import CELL_SHIFT, PAGE_SHIFT, Places, loaded_by
from ksym_plugin.timeline.pairing import Ledger
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
    Lifetime,
    Load,
    Loss,
    Reason,
    Unload,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final, Union

    from ksym_plugin.timeline.index import Track
    from ksym_plugin.timeline.symbols import Lifetime

    #: A lifetime and how certain it is, or None and why there is none.
    Answer = Union[tuple[Lifetime, str], tuple[None, Reason]]

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


#: Of what may have been loaded already, so many are looked at in a track.
_MOST_RIVALS: Final = 16


class Timeline:
    """Lifetimes of symbols, by address and time.

    Not safe for use from several threads at once; its owner holds a lock.
    """

    #: Whether it is told of modules; then no other table of them is of use.
    has_modules = False

    def __init__(self) -> None:
        self._ground = 0
        self._begin()
        self._gap_starts: list[int] = []
        self._gap_ends: list[int] = []

    def _begin(self) -> None:
        self._places = Places()
        self._ledger = Ledger(self._places)
        # Look-ups are the hot path: one attribute less to walk.
        self._cells = self._places.cells
        self._wide = self._places.wide
        self._starts = self._places.starts
        self._open_pages = self._places.open_pages

    @property
    def count(self) -> int:
        """The number of lifetimes held, ended ones included."""
        return self._ledger.count

    @property
    def extent(self) -> int:
        """Grows when new ground is held: an address that was unknown must be asked again."""
        return self._ground + len(self._cells) + len(self._wide) + len(self._open_pages)

    def apply(self, change: Load | Unload | Loss) -> Lifetime | None:
        """Take in one change; the lifetime it began, ended or narrowed, if any.

        An unload that matches nothing changes nothing, unless its load arrives later.
        A symbol of no length (a program that was not JITed) covers nothing.
        """
        if isinstance(change, Load):
            return self._ledger.load(change)
        if isinstance(change, Unload):
            return self._ledger.unload(change)
        self._lose(change.since, change.until)
        return None

    def take_disturbed(self) -> list[Lifetime]:
        """Lifetimes that late reports changed besides those ``apply`` returned; once each call."""
        disturbed, self._ledger.disturbed = self._ledger.disturbed, []
        return disturbed

    def enter(self, lifetime: Lifetime) -> None:
        """Take in a whole lifetime, as a history has it."""
        self._ledger.enter(lifetime)

    def at(self, address: int, time: int) -> Answer:
        """Who had ``address`` at ``time`` (CLOCK_MONOTONIC ns), and how certain that is.

        AMBIGUOUS where the time falls into the window in which one symbol followed
        another and their names differ.
        """
        best: Lifetime | None = None
        loaded = -1
        tracks: Sequence[Track] = self._cells.get(address >> CELL_SHIFT, ())
        if self._wide:
            tracks = self._places.tracks_at(address)
        for track in tracks:
            if track.blur:
                return self._weigh(address, time)
            times = track.times
            at = bisect_right(times, time)
            if at and times[at - 1] >= loaded:
                lifetime = track.lifetimes[at - 1]
                symbol = lifetime.symbol
                if symbol.start <= address < symbol.end:
                    if times[at - 1] == loaded:
                        return self._weigh(address, time)
                    best, loaded = lifetime, times[at - 1]
        if self._open_pages and (address >> PAGE_SHIFT) in self._open_pages:
            return self._weigh(address, time)
        if best is None:
            return self._miss(address, bool(tracks), time)
        until = best.unloaded_earliest
        if until is None or time > until:
            has_left = self._has_left(best, address, time)
            return self._miss(address, True, time) if has_left else self._judge(best, time)
        return self._judge(best, time) if self._gap_ends else (best, EXACT)

    def started_at(self, start: int) -> list[Lifetime]:
        """All lifetimes held that began at an address, by load."""
        return self._starts.get(start, [])

    def open(self) -> list[Lifetime]:
        """All whose end was not reported, also where another was loaded over them since."""
        return list(self._ledger.live.values())

    def live(self) -> list[Lifetime]:
        """The lifetimes that have not ended, by start."""
        standing: list[Lifetime] = []
        above: list[Lifetime] = []
        for start in sorted(self._ledger.live):
            lifetime = self._ledger.live[start]
            above = [other for other in above if other.symbol.end > start]
            # What was loaded later over this one's start has ended it, reported or not.
            if any(loaded_after(other, lifetime) for other in above):
                continue
            standing.append(lifetime)
            if not lifetime.open_ended:
                above.append(lifetime)
        return standing

    def lifetimes(self) -> list[Lifetime]:
        """All lifetimes held, by start and load."""
        starts = self._places.starts
        return [lifetime for start in sorted(starts) for lifetime in starts[start]]

    def expire(self, before: int) -> None:
        """Drop lifetimes that ended before ``before``, for a recorder that runs for long."""
        kept = [
            lifetime
            for lifetime in self.lifetimes()
            if lifetime.unloaded_latest is None or lifetime.unloaded_latest >= before
        ]
        self._ground = self.extent
        self._begin()
        for lifetime in kept:
            self._ledger.enter(lifetime)

    def lost_between(self, since: int, until: int) -> bool:
        """Whether changes may have been lost at any time from ``since`` to ``until``."""
        at = bisect_right(self._gap_ends, since - 1)
        return at < len(self._gap_starts) and self._gap_starts[at] <= until

    def _lose(self, since: int, until: int) -> None:
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
        tracks = self._places.tracks_at(address)
        for track in tracks:
            times = track.times
            at = bisect_right(times, time)
            if at < len(times) and times[at] - track.blur <= time:
                rivals += _possible(track.lifetimes[at : at + _MOST_RIVALS], address, time)
            for lifetime in _last_covering(track, at, address):
                if best is None or not are_tied(lifetime, best):
                    best = lifetime if best is None or loaded_after(lifetime, best) else best
                else:
                    rivals.append(lifetime)
        if best is not None and self._has_left(best, address, time):
            best = None
        if self._open_pages and (address >> PAGE_SHIFT) in self._open_pages:
            return self._with_open_ended(address, time, best, rivals)
        if rivals:
            return self._settle(address, best, rivals, time)
        return self._miss(address, bool(tracks), time) if best is None else self._judge(best, time)

    def _judge(self, lifetime: Lifetime, time: int) -> Answer:
        """The answer that ``lifetime`` was the last to have the place."""
        unloaded = lifetime.unloaded_latest
        if unloaded is None or time <= unloaded:
            return lifetime, GAP if self._gap_ends and self.lost_between(time, time) else EXACT
        if time - unloaded > grace(lifetime):
            return self._miss(lifetime.symbol.start, True, time)
        # What came and went in a gap since the unload could have taken the place.
        since = lifetime.unloaded_earliest
        if self._gap_ends and self.lost_between(unloaded if since is None else since, time):
            return lifetime, GAP
        return lifetime, GRACE

    def _miss(self, address: int, held: bool, time: int) -> Answer:
        if self._gap_ends and self.lost_between(time, time):
            return None, LOST
        is_among_bpf = self._places.is_among_bpf(address)
        if held:
            return None, NOT_LOADED if is_among_bpf else VACANT
        return None, AMONG_BPF if is_among_bpf else UNKNOWN_ADDRESS

    def _settle(
        self, address: int, best: Lifetime | None, rivals: list[Lifetime], time: int
    ) -> Answer:
        """Decide between the symbol that was there and those that may have come already."""
        ended = None if best is None else best.unloaded_earliest
        if ended is not None and time < ended:
            # Whoever came after its end was not there yet.
            rivals = [rival for rival in rivals if rival.loaded_latest < ended]
        candidates = [
            one
            for one in (rivals if best is None else [best, *rivals])
            if one.unloaded_latest is None or time - one.unloaded_latest <= grace(one)
        ]
        names = {(lifetime.symbol.start, lifetime.symbol.name) for lifetime in candidates}
        if len(names) > 1:
            return None, AMBIGUOUS
        if not candidates:
            return self._miss(address, True, time)
        # All of one name: the one that lasts longest says how certain it is.
        return self._judge(max(candidates, key=_last_seen), time)

    def _with_open_ended(
        self, address: int, time: int, best: Lifetime | None, rivals: list[Lifetime]
    ) -> Answer:
        """Weigh the symbols whose end is only an upper bound against the others."""
        reaching: list[Lifetime] = []
        for start in self._open_pages[address >> PAGE_SHIFT]:
            if start > address:
                continue
            place = self._starts[start]
            at = loaded_by(place, time)
            if at and self._reaches(place[at - 1], address, time):
                reaching.append(place[at - 1])
            rivals += [
                rival
                for rival in _possible(place[at : at + _MOST_RIVALS], address, time)
                if rival.open_ended and self._reaches(rival, address, time)
            ]
        reaching = [image for image in reaching if not self._has_left(image, address, time)]
        for image in sorted(reaching, key=lambda life: life.symbol.start, reverse=True):
            verdict = best is None or outranks(image, best, time)
            if verdict is None:
                return None, AMBIGUOUS
            best = image if verdict else best
        rivals = [
            rival for rival in rivals if not rival.open_ended or self._reaches(rival, address, time)
        ]
        if rivals:
            return self._settle(address, best, rivals, time)
        if best is None:
            return self._miss(address, True, time)
        return self._judge(best, time)

    def _has_left(self, lifetime: Lifetime, address: int, time: int) -> bool:
        """Whether by ``time`` something was loaded over its start: then nothing of it is left.

        Nor is, of what has ended, what something else has had at ``address`` since.
        """
        start, loaded = lifetime.symbol.start, lifetime.loaded_latest
        place = self._starts[start]
        if place[-1] is not lifetime and place[loaded_by(place, time) - 1] is not lifetime:
            return True
        for track in self._places.tracks_at(start):
            if track.times[-1] < loaded or track.lifetimes[-1] is lifetime:
                continue
            at = bisect_right(track.times, time)
            if at and is_over(track.lifetimes[at - 1], lifetime):
                return True
        ended = lifetime.unloaded_latest
        if ended is None or time <= ended:
            return False
        return self._was_taken(start, lifetime, time) or self._was_taken(address, lifetime, time)

    def _was_taken(self, byte: int, lifetime: Lifetime, time: int) -> bool:
        """Whether what came later had a byte of a symbol that has ended, and has gone since.

        Among very many that is taken for granted: the symbol is only in question because it
        may still run.
        """
        for track in self._places.tracks_at(byte):
            last = bisect_right(track.times, time)
            first = max(last - _MOST_RIVALS, 0)
            for other in reversed(track.lifetimes[first:last]):
                if other.loaded_latest < lifetime.loaded_latest:
                    break
                symbol = other.symbol
                if symbol.start <= byte < symbol.end and loaded_after(other, lifetime):
                    return True
            else:
                if first:
                    return True
        return False

    def _reaches(self, image: Lifetime, address: int, time: int) -> bool:
        """Whether an open-ended symbol can extend to ``address``."""
        if not image.open_ended or image.symbol.end <= address:
            return False
        for place in self._places.starting_between(image.symbol.start + 1, address):
            at = loaded_by(place, time)
            if at and coexisted(place[at - 1], image):
                return False
        return True


def _last_covering(track: Track, at: int, address: int) -> list[Lifetime]:
    """Of a track's first ``at`` lifetimes the last, or all of that time, over ``address``."""
    last: list[Lifetime] = []
    times = track.times
    while at and (not last or times[at - 1] == last[0].loaded_latest):
        at -= 1
        last.append(track.lifetimes[at])
    return [one for one in last if one.symbol.start <= address < one.symbol.end]


def _possible(following: list[Lifetime], address: int, time: int) -> list[Lifetime]:
    """Of what was surely loaded only after ``time``, that which may have been by then."""
    return [
        lifetime
        for lifetime in following
        if lifetime.loaded_earliest <= time
        and lifetime.symbol.start <= address < lifetime.symbol.end
    ]


def _last_seen(lifetime: Lifetime) -> float:
    """When a lifetime ended, for comparisons."""
    until = lifetime.unloaded_latest
    return float("inf") if until is None else until
