"""Which lifetimes lie over an address: the index under the timeline.

It is a centered interval tree without its pointers. The *center* of a symbol is the one
address above its start, up to its end, that has the most trailing zero bits. All symbols with
one center share the byte before it, so no two of them were there at a time: they make one
*bucket*, in which one binary search finds the lifetime of a time. A symbol is entered once,
whatever its size.

Addresses are cut into chunks of 64 bytes, the kernel's own grain for BPF text
(BPF_PROG_CHUNK_SIZE in kernel/bpf/core.c). Each chunk lists the buckets that reach it, two or
three as a rule. What is wider than 64 KB, as modules are, has buckets that are listed by page.

A symbol whose end is only an upper bound is indexed by its start alone, and by the pages
that it may reach.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ksym_plugin.timeline.symbols import Lifetime


class Bucket:
    """Lifetimes that share a byte, in load order: each of them replaced the one before."""

    __slots__ = ("first", "last", "lifetimes", "times", "widest_window")

    def __init__(self, first: int, last: int) -> None:
        #: The first and the last chunk, or page, that it is listed in.
        self.first = first
        self.last = last
        #: The ``loaded_latest`` of each of ``lifetimes``.
        self.times: list[int] = []
        self.lifetimes: list[Lifetime] = []
        #: The widest window of a load, in ns; at least 1 where two are of one time.
        self.widest_window = 0

    def append(self, lifetime: Lifetime) -> None:
        """Take in a lifetime, most often the latest."""
        latest, times = lifetime.loaded_latest, self.times
        width = latest - lifetime.loaded_earliest
        if width > self.widest_window:  # noqa: PLR1730 - a call costs more, once a load
            self.widest_window = width
        if not times or latest > times[-1]:
            times.append(latest)
            self.lifetimes.append(lifetime)
            return
        at = insertion_point(self.lifetimes, lifetime)
        if latest in times[max(0, at - 1) : at + 1]:
            self.widest_window = max(self.widest_window, 1)
        times.insert(at, latest)
        self.lifetimes.insert(at, lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        at = index_of(self.lifetimes, lifetime)
        del self.times[at]
        del self.lifetimes[at]


def loaded_by(lifetimes: list[Lifetime], time: int) -> int:
    """How many of ``lifetimes``, in load order, were surely loaded by ``time``."""
    low, high = 0, len(lifetimes)
    if high and lifetimes[-1].loaded_latest <= time:
        return high
    while low < high:
        middle = (low + high) // 2
        if lifetimes[middle].loaded_latest <= time:
            low = middle + 1
        else:
            high = middle
    return low


def insertion_point(lifetimes: list[Lifetime], lifetime: Lifetime) -> int:
    """Where to insert one more into ``lifetimes``, which are in load order."""
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


CHUNK_SHIFT = 6
PAGE_SHIFT = 12
#: Since Linux 5.18 programs are packed into areas of PMD_SIZE (bpf_prog_pack in
#: kernel/bpf/core.c), 2 MB with pages of 4 KB, for each possible NUMA node. Nothing else lies
#: in them but classic BPF and images. They begin at any page.
AREA_SHIFT = 21
#: Longer symbols than this are wide.
WIDE = 1 << 16


class AddressIndex:
    """All lifetimes by start, by center and by chunk; the open-ended ones by page."""

    def __init__(self) -> None:
        #: Start address to all that ever started there, in load order.
        self.starts: dict[int, list[Lifetime]] = {}
        #: Chunk number to the buckets whose symbols reach into it.
        self.by_chunk: dict[int, list[Bucket]] = {}
        #: Page number to the buckets of wide symbols.
        self.by_page: dict[int, list[Bucket]] = {}
        #: Page number to the starts of open-ended symbols that may reach into it.
        self.open_pages: dict[int, list[int]] = {}
        #: Numbers of the areas of 2 MB in which BPF symbols started.
        self.areas: set[int] = set()
        #: Page number to all starts in it, ascending.
        self._starts_in: dict[int, list[int]] = {}
        #: The number of lifetimes.
        self.count = 0
        self._by_center: dict[int, Bucket] = {}
        self._wide_by_center: dict[int, Bucket] = {}

    def insert(self, lifetime: Lifetime) -> None:
        self.count += 1
        symbol = lifetime.symbol
        start, end = symbol.start, symbol.end
        same_start = self.starts.get(start)
        if same_start is None:
            self.starts[start] = [lifetime]
            insort(self._starts_in.setdefault(start >> PAGE_SHIFT, []), start)
            if symbol.module == BPF_MODULE:
                self.areas.add(start >> AREA_SHIFT)
        elif not same_start or lifetime.loaded_latest > same_start[-1].loaded_latest:
            same_start.append(lifetime)
        else:
            same_start.insert(insertion_point(same_start, lifetime), lifetime)
        if lifetime.open_ended:
            for page in range(start >> PAGE_SHIFT, ((end - 1) >> PAGE_SHIFT) + 1):
                starts = self.open_pages.setdefault(page, [])
                if start not in starts:
                    starts.append(start)
            return
        center = center_of(start, end)
        by_center, listed, shift = self._by_center, self.by_chunk, CHUNK_SHIFT
        if end - start > WIDE:
            by_center, listed, shift = self._wide_by_center, self.by_page, PAGE_SHIFT
        bucket = by_center.get(center)
        first, last = start >> shift, (end - 1) >> shift
        if bucket is None:
            bucket = by_center[center] = Bucket(first, first - 1)
        if first < bucket.first or last > bucket.last:
            _enlist(listed, bucket, first, last)
        bucket.append(lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        """Take a lifetime out; its times and symbol must still be those it went in with."""
        self.count -= 1
        symbol = lifetime.symbol
        same_start = self.starts[symbol.start]
        del same_start[index_of(same_start, lifetime)]
        if not lifetime.open_ended:
            is_wide = symbol.end - symbol.start > WIDE
            by_center = self._wide_by_center if is_wide else self._by_center
            by_center[center_of(symbol.start, symbol.end)].remove(lifetime)

    def buckets_at(self, address: int) -> Sequence[Bucket]:
        """The buckets of all lifetimes over an address, and maybe of some nearby."""
        buckets = self.by_chunk.get(address >> CHUNK_SHIFT, ())
        wide = self.by_page and self.by_page.get(address >> PAGE_SHIFT)
        return (*buckets, *wide) if wide else buckets

    def buckets_between(self, start: int, end: int) -> set[Bucket]:
        """The buckets of all lifetimes with a byte from ``start`` on before ``end``."""
        found: set[Bucket] = set()
        for listed, shift in ((self.by_chunk, CHUNK_SHIFT), (self.by_page, PAGE_SHIFT)):
            for number in range(start >> shift, ((end - 1) >> shift) + 1):
                found.update(listed.get(number, ()))
        return found

    def is_among_bpf(self, address: int, nodes: int) -> bool:
        """Whether a BPF symbol may be in one area with the address: ``AREA_SHIFT``."""
        number = address >> AREA_SHIFT
        return not self.areas.isdisjoint(range(number - nodes, number + nodes + 1))

    def starting_between(self, low: int, high: int) -> Iterator[list[Lifetime]]:
        """What started from ``high`` down to ``low``, inclusive, on pages of ``open_pages``."""
        for page in range(high >> PAGE_SHIFT, (low >> PAGE_SHIFT) - 1, -1):
            if page in self.open_pages:
                starts = self._starts_in.get(page, [])
                within = starts[bisect_left(starts, low) : bisect_right(starts, high)]
                yield from [self.starts[start] for start in reversed(within)]


def _enlist(listed: dict[int, list[Bucket]], bucket: Bucket, first: int, last: int) -> None:
    """List a bucket under all numbers from ``first`` to ``last``."""
    for number in (*range(first, bucket.first), *range(bucket.last + 1, last + 1)):
        listed.setdefault(number, []).append(bucket)
    bucket.first = min(first, bucket.first)
    bucket.last = max(last, bucket.last)


def center_of(start: int, end: int) -> int:
    """The address above ``start``, up to ``end``, with the most trailing zero bits."""
    level = (start ^ end).bit_length() - 1
    return end >> level << level
