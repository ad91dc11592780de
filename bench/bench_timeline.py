"""The timeline with 10,000 live symbols: changes applied, look-ups of four kinds.

All in CPU time. The changes are made beforehand; only ``Timeline.apply`` is measured:
once as loaders churn, and once with a new program at a new place each time.
Look-ups are of distinct (address, time) pairs, each address within a lifetime drawn
evenly from all that ever were and the time within its life, so nothing can be cached:
once in time order, as perf delivers samples, and once shuffled, where nearly every step
misses the CPU's caches. Callchains go through ``Resolver.frames``, as the handler's do:
20 frames, one or two of them BPF, the others out of 2,000 static addresses.
"""

from __future__ import annotations

import random

from bench import bcc_peer, workload
from bench.measure import in_turn, settle
from bench.report import CPU, row
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ksym_plugin.timeline.symbols import Load, Unload

LIVE, CHANGES, LOOK_UPS, CHAINS, ROUNDS = 10_000, 100_000, 100_000, 10_000, 7
QUICK = (200, 2_000, 2_000, 200, 2)
TEXT = 0xFFFF_FFFF_8100_0000
_DEPTH, _STATICS = 20, 2_000


def filled(changes: Iterable[Load | Unload]) -> Timeline:
    timeline = Timeline()
    for change in changes:
        timeline.apply(change)
    return timeline


def pairs_of(timeline: Timeline, count: int, end: int) -> list[tuple[int, int]]:
    """Addresses in lifetimes and times in their lives, by time."""
    pick = random.Random(2)
    lifetimes = timeline.lifetimes()
    pairs = []
    for lifetime in pick.choices(lifetimes, k=count):
        symbol, until = lifetime.symbol, lifetime.unloaded_latest or end
        address = pick.randrange(symbol.start, symbol.end)
        pairs.append((address, pick.randrange(lifetime.loaded_latest, until + 1)))
    return sorted(pairs, key=lambda pair: pair[1])


def chains_of(pairs: list[tuple[int, int]], count: int) -> list[tuple[list[int], int]]:
    """Callchains: static frames as kernels repeat them, and one or two BPF ones."""
    pick = random.Random(3)
    statics = [TEXT + 64 * number for number in range(_STATICS)]
    chains = []
    for address, time in pairs[:: max(1, len(pairs) // count)][:count]:
        chain = pick.choices(statics, k=_DEPTH)
        chain[pick.randrange(_DEPTH)] = address
        if pick.randrange(2):
            chain[pick.randrange(_DEPTH)] = address + 4
        chains.append((chain, time))
    return chains


def statics() -> Kallsyms:
    lines = (f"{TEXT + 64 * number:016x} T function_{number}\n" for number in range(_STATICS + 1))
    return Kallsyms.parse("".join(lines).encode())


def rows(quick: bool) -> list[dict[str, Any]]:
    live, count, look_ups, chain_count, rounds = (
        QUICK if quick else (LIVE, CHANGES, LOOK_UPS, CHAINS, ROUNDS)
    )
    first, changes = workload.populated(live, count)
    timeline = filled([*first, *changes])
    pairs = pairs_of(timeline, look_ups, changes[-1].latest)
    shuffled = random.Random(4).sample(pairs, len(pairs))
    chains = chains_of(pairs, chain_count)
    resolver = Resolver(timeline, statics())
    others, worst = workload.populated(live, count, all_restless=True)
    settle()

    def apply(first: list[Load], changes: list[Load | Unload]) -> Callable[[], object]:
        fresh = filled(first)
        return lambda: apply_all(fresh, changes)

    applied, applied_worst, ordered, random_order, frames = in_turn(
        rounds,
        lambda: apply(first, changes),
        lambda: apply(others, worst),
        lambda: lambda: ask_all(timeline, pairs),
        lambda: lambda: ask_all(timeline, shuffled),
        lambda: lambda: name_all(resolver, chains),
    )
    peer, theirs, why = bcc_peer.look_ups_per_second(rounds)
    addresses = sum(len(chain) for chain, _ in chains)
    return [
        row(
            f"changes applied, {live:,} live",
            applied.per(len(changes)),
            "changes/s",
            (">=", 300_000),
            CPU,
            note=f"{len(changes):,} changes, a tenth of the symbols come and go; 40 bytes to"
            " 60 KB, median 500",
        ),
        row(
            "  all of them come and go, each new",
            applied_worst.per(len(worst)),
            "changes/s",
            None,
            CPU,
        ),
        row(
            "look-ups, distinct, in time order",
            ordered.per(len(pairs)),
            "look-ups/s",
            (">=", 400_000),
            CPU,
            peer,
            theirs,
            f"{len(pairs):,} pairs over {timeline.count:,} lifetimes; {why}",
        ),
        row(
            "look-ups, distinct, shuffled",
            random_order.per(len(pairs)),
            "look-ups/s",
            None,
            CPU,
            peer,
            theirs,
            "the same pairs",
        ),
        row(
            "frames of repeating callchains",
            frames.per(addresses),
            "frames/s",
            (">=", 1_500_000),
            CPU,
            peer,
            theirs,
            f"{len(chains):,} chains of {_DEPTH} frames, 1 or 2 BPF, static ones cached",
        ),
    ]


def apply_all(timeline: Timeline, changes: list[Load | Unload]) -> None:
    apply = timeline.apply
    for change in changes:
        apply(change)


def ask_all(timeline: Timeline, pairs: list[tuple[int, int]]) -> None:
    at = timeline.at
    for address, time in pairs:
        at(address, time)


def name_all(resolver: Resolver, chains: list[tuple[list[int], int]]) -> None:
    frames = resolver.frames
    for chain, time in chains:
        frames(chain, time)
