"""What following one change costs, against the re-read of kallsyms that it replaces.

Reading kallsyms is quadratic in the number of BPF symbols. 10,000 programs must not be
loaded just to measure that, so the re-read's 1.5 s are the documented figure; beside
them stands what a read takes here and now.
"""

from __future__ import annotations

from bench import workload
from bench.bench_timeline import CHANGES, LIVE, QUICK, ROUNDS, apply_all, filled
from bench.measure import in_turn, settle
from bench.report import CPU, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Seconds of one read of /proc/kallsyms with 10,000 BPF programs loaded (Linux 6.18).
REREAD = 1.5
REREAD_NOTE = "1.5 s for a re-read with 10,000 BPF symbols is taken from docs, not measured here"
FEWER = (">=", 10_000)
TABLE = "/proc/kallsyms"


def rows(quick: bool) -> list[dict[str, Any]]:
    live, count, _, _, rounds = QUICK if quick else (LIVE, CHANGES, 0, 0, ROUNDS)
    first, changes = workload.populated(live, count)
    settle()

    def apply() -> Callable[[], object]:
        fresh = filled(first)
        return lambda: apply_all(fresh, changes)

    applied, read = in_turn(rounds, apply, lambda: read_table)
    each = applied.times(1 / len(changes))
    symbols = bpf_symbols()
    return [
        row("one change, through the timeline", each.times(1e6), "us", None, CPU),
        row(
            "re-read of kallsyms, times that",
            each.per(REREAD),
            "times",
            FEWER,
            CPU,
            f"a read here, {symbols} BPF symbols (times)",
            read.median / each.median,
            REREAD_NOTE,
        ),
        row(f"a read of kallsyms here, {symbols} BPF symbols", read.times(1e3), "ms", None, CPU),
    ]


def read_table() -> bytes:
    try:
        with open(TABLE, "rb") as file:
            return file.read()
    except OSError:
        return b""


def bpf_symbols() -> int:
    return read_table().count(b"\t[bpf]\n")
