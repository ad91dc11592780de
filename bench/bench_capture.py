"""Of how many short-lived programs ``ksym record`` has the source lines, by their life.

A process loads 100 programs a second, each with a line table and BTF of its own, and
unloads each after its life. What the history then has of them is counted. Needs root; never
more than ten programs at a time. In a guest (``scripts/vm --shell 'python3 -m bench capture'``)
a load alone takes longer than a life, and lives become what the note says.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile

from bench.measure import REPO, Figures, run
from bench.report import WALL, not_measured, row
from ksym_plugin.history.reader import History
from tests.oracle import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LIVES, RATE = (1, 2, 10, 100), 100
ROUNDS, LOADS = 3, 200
QUICK = (1, 20)
_NAME = "lines of programs living {} ms"
_BAR = (">=", 95.0)


def rows(quick: bool) -> list[dict[str, Any]]:
    rounds, count = QUICK if quick else (ROUNDS, LOADS)
    why = "needs root" if os.geteuid() else ""
    if not why:
        state, reason = probe.ask()
        why = "" if state == probe.ANSWERS else reason
    if why:
        return [not_measured(_NAME.format(2), "%", _BAR, why)]
    taken: dict[int, list[tuple[float, float, float]]] = {life: [] for life in LIVES}
    for _ in range(rounds):
        for life, found in taken.items():
            found.append(measure(life, count))
    return [row_of(life, count, found) for life, found in taken.items()]


def row_of(life: int, count: int, found: list[tuple[float, float, float]]) -> dict[str, Any]:
    shares, lived, rates = zip(*found)
    note = f"{count} loads a round, {statistics.median(rates):.0f} a second; the median lived"
    note += f" {statistics.median(lived):.1f} ms"
    bar = _BAR if life > 1 else None
    return row(_NAME.format(life), Figures(shares), "%", bar, WALL, note=note)


def measure(life: int, count: int) -> tuple[float, float, float]:
    """The share in percent, the median life in ms and the loads a second."""
    with tempfile.TemporaryDirectory(prefix="ksym-bench-") as folder:
        history, out = os.path.join(folder, "lines.db"), os.path.join(folder, "out")
        loader = [sys.executable, "-m", "bench.capture_loader", str(count), str(life), str(RATE)]
        record = [sys.executable, "-m", "ksym_plugin.cli", "record", "-o", history, "--"]
        run([*record, *loader], out, cwd=REPO)
        with open(out, encoding="utf-8") as file:
            lives = dict(json.loads(line) for line in file)
        with History(history) as known:
            past = known.recorded(known.boots()[-1])
            lifetimes = [one for one in past.lifetimes() if one.prog_id in lives]
            details = {one.prog_id: past.programs.of(one) for one in lifetimes}
    read = sum(program is not None and not program.problem for program in details.values())
    loads = sorted(one.loaded_earliest for one in lifetimes)
    rate = (len(loads) - 1) / max(loads[-1] - loads[0], 1) * 1e9
    return 100 * read / count, statistics.median(lives.values()) / 1e6, rate
