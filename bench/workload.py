"""A kernel's BPF text as the timeline meets it: sizes, places and churn, from a fixed seed.

Sizes are log-normal with a median of 500 bytes, a mean of 820, and one in ten over
1.8 KB: between systemd's device filters (some 200 bytes) and network data paths (tens
of KB). Places follow the kernel's allocator (bpf_jit_binary_pack_alloc): the first free
run of 64-byte chunks, the program a random multiple of four bytes into what its last
chunk leaves, so an address is used again as soon as it is free. Which program goes next
is drawn evenly from all: the worst case for caches.
"""

from __future__ import annotations

import random

from ksym_plugin.timeline.symbols import BPF_PROG, Load, Symbol, Unload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 64
BASE = 0xFFFF_FFFF_C000_0000
#: Between two changes, in ns.
STEP = 1_000_000
#: Different programs that loaders have.
PROGRAMS = 300
_HEADER = 8
_MEDIAN, _SIGMA, _LEAST, _MOST = 500, 1.0, 40, 60_000


class Kernel:
    """Programs come and go; every change is a report with the exact time."""

    def __init__(
        self, chunks: int, most: int = _MOST, programs: int | None = None, spread: bool = False
    ) -> None:
        self.now = 1_000_000_000
        self.random = random.Random(1)
        self.live: list[tuple[Load, int, int]] = []
        self._used = bytearray(chunks)
        self._most = most
        self._id = self._from = 0
        #: Whether each search for room begins where the last one ended.
        self._spread = spread
        self._sizes = [self._size() for _ in range(programs or 0)]

    def load(self) -> Load:
        """Load one program; MemoryError when no run of chunks is long enough."""
        size = self.random.choice(self._sizes) if self._sizes else self._size()
        chunks = -(-(size + _HEADER) // CHUNK)
        at = self._used.find(bytes(chunks), self._from)
        if at < 0:
            at = self._used.find(bytes(chunks))
        if at < 0:
            raise MemoryError("no room for a program")
        self._used[at : at + chunks] = b"\1" * chunks
        if self._spread:
            self._from = at + chunks
        self.now += STEP
        self._id += 1
        hole = chunks * CHUNK - size - _HEADER
        start = BASE + at * CHUNK + _HEADER + (self.random.randrange(hole + 1) & ~3)
        name = f"bpf_prog_{self.random.getrandbits(64):016x}_prog_{self._id % 1000}"
        symbol = Symbol(start, start + size, name, BPF_PROG, "[bpf]")
        load = Load(symbol, self.now, self.now, self._id)
        self.live.append((load, at, chunks))
        return load

    def _size(self) -> int:
        size = int(self.random.lognormvariate(0, _SIGMA) * _MEDIAN) & ~3
        return min(max(size, _LEAST), self._most)

    def unload(self) -> Unload:
        """Unload one of ``live``."""
        live = self.live
        pick = self.random.randrange(len(live))
        live[pick], live[-1] = live[-1], live[pick]
        load, at, chunks = live.pop()
        self._used[at : at + chunks] = bytes(chunks)
        self.now += STEP
        return Unload(load.symbol.start, self.now, self.now, load.symbol.name)

    def churn(self, count: int) -> list[Load | Unload]:
        """``count`` changes, an unload and a load in turn."""
        return [self.load() if turn % 2 else self.unload() for turn in range(count)]

    def crowd(self, count: int, live: int) -> Iterator[Load | Unload]:
        """Changes with ``count`` loads, on ground so tight that it holds some ``live``."""
        done = 0
        while done < count:
            if len(self.live) < live:
                try:
                    yield self.load()
                    done += 1
                    continue
                except MemoryError:
                    pass
            yield self.unload()


def populated(
    live: int, churned: int, all_restless: bool = False
) -> tuple[list[Load], list[Load | Unload]]:
    """The loads of ``live`` programs, and ``churned`` changes that follow."""
    kernel = Kernel(live * 20, programs=None if all_restless else PROGRAMS)
    first = [kernel.load() for _ in range(live)]
    if not all_restless:
        kernel.random.shuffle(kernel.live)
        del kernel.live[max(1, live // 10) :]
    return first, kernel.churn(churned)


#: The ground of ``crowd``: 64 pages, and how many symbols it holds at a time.
CROWD_PAGES = 64
CROWD_LIVE = 200


def crowded(count: int) -> Iterator[Load | Unload]:
    """The changes of ``count`` lifetimes on 64 pages; no symbol is longer than a page.

    Unlike the kernel's, they are spread evenly: by first fit, half the pages would hold
    nearly all of them.
    """
    return Kernel(CROWD_PAGES * 4096 // CHUNK, most=4096, spread=True).crowd(count, CROWD_LIVE)
