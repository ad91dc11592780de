"""The symbol table: a load of /proc/kallsyms against reading the file, memory, look-ups.

Peers: ``open().read()``, and the usual table in Python, one tuple a symbol. Memory is
that of a process of its own, above what it held after its imports.
"""

from __future__ import annotations

import random

from bench.measure import in_child, in_turn, memory_mb, settle
from bench.report import CPU, not_measured, row
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline.errors import KallsymsError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TABLE = "/proc/kallsyms"
ROUNDS, LOOK_UPS = 9, 50_000
QUICK = (2, 1_000)
TWICE = ("<=", 2)
#: What 122,000 symbols may cost is what any number may cost, by the symbol.
BYTES_A_SYMBOL = 16 * 2**20 / 122_000


def rows(quick: bool) -> list[dict[str, Any]]:
    rounds, look_ups = QUICK if quick else (ROUNDS, LOOK_UPS)
    try:
        table = Kallsyms.load(TABLE)
    except KallsymsError as error:
        return [not_measured("load against the bare read", "times", TWICE, str(error))]
    read, load = in_turn(rounds, lambda: bare_read, lambda: Kallsyms.load)
    held, peak, count = in_child("bench_kallsyms", "memory", "ours")
    plain, plain_peak, _ = in_child("bench_kallsyms", "memory", "tuples")
    (found,) = in_turn(rounds, lambda: looking_up(table, look_ups))
    return [
        row(
            f"load of {count:,} symbols against the bare read",
            load.over(read),
            "times",
            TWICE,
            CPU,
            "open().read()",
            1.0,
        ),
        row("  load", load.times(1e3), "ms", None, CPU, "open().read() (ms)", read.median * 1e3),
        row(
            "memory held",
            held,
            "MB",
            ("<=", round(BYTES_A_SYMBOL * count / 2**20, 2)),
            peer="a tuple a symbol",
            peer_figures=plain,
            note="the bar is 16 MB for 122,000 symbols",
        ),
        row("memory at its peak", peak, "MB", peer="a tuple a symbol", peer_figures=plain_peak),
        row("a look-up", found.times(1e6 / look_ups), "us", None, CPU),
    ]


def bare_read() -> None:
    with open(TABLE, "rb") as file:
        file.read()


def memory(which: str) -> tuple[float, float, int]:
    """MB held after the load and at its peak, and the number of symbols."""
    with open("/proc/version", "rb"):
        pass
    before = memory_mb(), memory_mb("VmHWM")
    table: Any = Kallsyms.load(TABLE) if which == "ours" else tuples()
    return memory_mb() - before[0], memory_mb("VmHWM") - before[1], len(table)


def tuples() -> list[tuple[int, str, str, str | None]]:
    with open(TABLE, encoding="ascii") as file:
        lines = (line.split() for line in file)
        return [(int(at[0], 16), at[1], at[2], at[3] if len(at) > 3 else None) for at in lines]


def looking_up(table: Kallsyms, count: int) -> Callable[[], object]:
    """Look-ups of distinct addresses spread over kernel text."""
    start = table.text_start or 0xFFFF_FFFF_8100_0000
    pick = random.Random(1)
    addresses = [start + pick.randrange(1 << 24) for _ in range(count)]
    settle()

    def work() -> None:
        for address in addresses:
            table.find(address)

    return work
