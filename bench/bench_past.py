"""A timeline that holds a million past lifetimes on 64 pages: what a look-up costs there.

Some 15,000 programs have been on each page, one after another. Look-ups are of distinct
pairs, shuffled, in CPU time; how they spread is in wall time, each clocked by itself.
"""

from __future__ import annotations

import gc
import random
import time

from bench import workload
from bench.bench_timeline import ask_all, filled, pairs_of
from bench.measure import in_turn, memory_mb, settle
from bench.report import CPU, WALL, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ksym_plugin.timeline.timeline import Timeline

LIFETIMES, LOOK_UPS, ROUNDS = 1_000_000, 50_000, 5
QUICK = (2_000, 1_000, 2)


def rows(quick: bool) -> list[dict[str, Any]]:
    count, look_ups, rounds = QUICK if quick else (LIFETIMES, LOOK_UPS, ROUNDS)
    before = memory_mb()
    gc.disable()
    timeline = filled(workload.crowded(count))
    gc.enable()
    held = memory_mb() - before
    end = max(life.unloaded_latest or life.loaded_latest for life in timeline.lifetimes())
    pairs = random.Random(4).sample(pairs := pairs_of(timeline, look_ups, end), len(pairs))
    settle()
    (taken,) = in_turn(rounds, lambda: lambda: ask_all(timeline, pairs))
    spread = sorted(clocked(timeline, pairs))
    return [
        row(
            f"a look-up among {timeline.count:,} lifetimes",
            taken.times(1e6 / len(pairs)),
            "us",
            ("<=", 20),
            CPU,
            note=f"{len(pairs):,} pairs, shuffled",
        ),
        row("  99 % of them take at most", spread[len(spread) * 99 // 100], "us", None, WALL),
        row("  the slowest takes", spread[-1], "us", None, WALL, note="other work may be in it"),
        row(
            "memory of a lifetime",
            held * 2**20 / timeline.count,
            "bytes",
            note=f"{held:,.0f} MB in all; a recorder drops what ended a minute ago",
        ),
    ]


def clocked(timeline: Timeline, pairs: list[tuple[int, int]]) -> list[float]:
    """Microseconds of each look-up, less those of reading the clock."""
    clock, at = time.perf_counter_ns, timeline.at
    idle = min(-clock() + clock() for _ in range(1000))
    taken = []
    for address, when in pairs:
        began = clock()
        at(address, when)
        taken.append((clock() - began - idle) / 1000)
    return taken
