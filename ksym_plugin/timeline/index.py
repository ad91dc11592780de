"""Which lifetimes lie over an address: the index under the timeline.

It is a centered interval tree without its pointers. The *center* of a symbol is the one
address above its start, up to its end, that has the most trailing zero bits. All symbols with
one center share the byte before it, so no two of them were there at a time: they make one
*bucket*, in which one binary search finds the lifetime of a time. A symbol is entered once,
whatever its size.

Addresses are cut into chunks of 64 bytes, the kernel's own grain for BPF text
(BPF_PROG_CHUNK_SIZE in kernel/bpf/core.c). Each chunk lists the buckets that reach it, two or
three as a rule. What is wider than 64 KB, as modules are, has buckets that are listed by page.

Symbols whose end is only an upper bound share no byte but their start, which has a bucket of
its own, listed by the pages that they may reach.
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

    def __init__(self, first: int, open_ended: bool) -> None:
        #: The first and the last chunk, or page, that it is listed in.
        self.first = first
        self.last = first - 1
        #: The ``loaded_latest`` of each of ``lifetimes``.
        self.times: list[int] = []
        self.lifetimes: list[Lifetime] = []
        #: The widest window of a load, in ns. At least 1 where two are of one time or ends are
        #: not known: where it is 0, the last one loaded has the address.
        self.widest_window = int(open_ended)

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
    """All lifetimes by start, and their buckets by chunk and by page."""

    def __init__(self) -> None:
        #: The number of lifetimes.
        self.count = 0
        #: Start address to all that ever started there, in load order.
        self.starts: dict[int, list[Lifetime]] = {}
        #: Chunk number to the buckets whose symbols reach into it.
        self.by_chunk: dict[int, list[Bucket]] = {}
        #: The same by page number, of symbols that are wide or whose end is not known.
        self.by_page: dict[int, list[Bucket]] = {}
        #: Numbers of the areas of 2 MB in which BPF symbols started.
        self.areas: set[int] = set()
        #: Page number to all starts in it, ascending.
        self._starts_in: dict[int, list[int]] = {}
        self._by_center: dict[int, Bucket] = {}
        self._wide_by_center: dict[int, Bucket] = {}
        self._open_by_start: dict[int, Bucket] = {}

    def insert(self, lifetime: Lifetime) -> None:
        self.count += 1
        symbol = lifetime.symbol
        start = symbol.start
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
        buckets, key = self._place(lifetime)
        listed, shift = self.by_page, PAGE_SHIFT
        if buckets is self._by_center:
            listed, shift = self.by_chunk, CHUNK_SHIFT
        bucket = buckets.get(key)
        first, last = start >> shift, (symbol.end - 1) >> shift
        if bucket is None:
            bucket = buckets[key] = Bucket(first, lifetime.open_ended)
        if first < bucket.first or last > bucket.last:
            _enlist(listed, bucket, first, last)
        bucket.append(lifetime)

    def remove(self, lifetime: Lifetime) -> None:
        """Take a lifetime out; its times and symbol must still be those it went in with."""
        self.count -= 1
        same_start = self.starts[lifetime.symbol.start]
        del same_start[index_of(same_start, lifetime)]
        buckets, key = self._place(lifetime)
        buckets[key].remove(lifetime)

    def _place(self, lifetime: Lifetime) -> tuple[dict[int, Bucket], int]:
        """Where the bucket of a lifetime is kept: by its center, or by its start."""
        start, end = lifetime.symbol.start, lifetime.symbol.end
        if lifetime.open_ended:
            return self._open_by_start, start
        level = (start ^ end).bit_length() - 1
        is_wide = end - start > WIDE
        return self._wide_by_center if is_wide else self._by_center, end >> level << level

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
        """What started from ``high`` down to ``low``, inclusive."""
        for page in range(high >> PAGE_SHIFT, (low >> PAGE_SHIFT) - 1, -1):
            starts = self._starts_in.get(page, [])
            within = starts[bisect_left(starts, low) : bisect_right(starts, high)]
            yield from [self.starts[start] for start in reversed(within)]


def _enlist(listed: dict[int, list[Bucket]], bucket: Bucket, first: int, last: int) -> None:
    """List a bucket under all numbers from ``first`` to ``last``."""
    for number in (*range(first, bucket.first), *range(bucket.last + 1, last + 1)):
        listed.setdefault(number, []).append(bucket)
    bucket.first = min(first, bucket.first)
    bucket.last = max(last, bucket.last)
