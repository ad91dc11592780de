"""Rows of figures against bars and peers: made by the benchmarks, printed as a table."""

from __future__ import annotations

import os
import platform
import textwrap

from bench.measure import Figures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MET, MISSED, NOT_MEASURED, NO_BAR = "met", "missed", "not measured", "-"
#: Which clock a figure is of.
CPU = "CPU time of the process"
WALL = "wall time"
NO_CLOCK = ""


def row(
    name: str,
    figures: Figures | float | None,
    unit: str,
    bar: tuple[str, float] | None = None,
    clock: str = NO_CLOCK,
    peer: str = "",
    peer_figures: Figures | float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """One figure; ``bar`` is ``("<=", limit)`` or ``(">=", limit)`` and judges the median.

    ``best`` is the extreme on the good side: the lowest, or for a ``>=`` bar and whatever
    is counted by the second the highest. Without figures, ``note`` says why.
    """
    mine, theirs = _figures(figures), _figures(peer_figures)
    rising = unit.endswith("/s") if bar is None else bar[0] == ">="
    return {
        "name": name,
        "value": mine and mine.median,
        "best": mine and (mine.high if rising else mine.low),
        "rounds": len(mine) if mine else 0,
        "unit": unit,
        "bar": list(bar) if bar else None,
        "verdict": _verdict(mine, bar),
        "clock": clock,
        "peer": peer,
        "peer_value": theirs and theirs.median,
        "note": note,
    }


def not_measured(name: str, unit: str, bar: tuple[str, float] | None, why: str) -> dict[str, Any]:
    return row(name, None, unit, bar, note=why)


def _figures(value: Figures | float | None) -> Figures | None:
    return value if value is None or isinstance(value, Figures) else Figures([value])


def _verdict(mine: Figures | None, bar: tuple[str, float] | None) -> str:
    if mine is None:
        return NOT_MEASURED
    if bar is None:
        return NO_BAR
    sign, limit = bar
    return MET if (mine.median <= limit if sign == "<=" else mine.median >= limit) else MISSED


def host() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def number(value: float | None) -> str:
    """Three digits that count, thousands apart."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(subjects: dict[str, list[dict[str, Any]]], width: int = 118) -> str:
    """All rows for a terminal: figure and bar beside the peer's, remarks below."""
    head = ["", "median", "best", "unit", "bar", "verdict", "peer"]
    lines = [_line(head)]
    for subject, rows in subjects.items():
        lines += ["", subject]
        for item in rows:
            lines.append(_line(_cells(item)))
            remarks = "; ".join(filter(None, (item["clock"], _rounds(item), item["note"])))
            lines += textwrap.wrap(
                remarks, width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    verdicts = [item["verdict"] for rows in subjects.values() for item in rows]
    counts = (f"{verdicts.count(one)} {one}" for one in (MET, MISSED, NOT_MEASURED))
    return "\n".join([*lines, "", "bars: " + ", ".join(counts)])


def _rounds(item: dict[str, Any]) -> str:
    return f"{item['rounds']} rounds" if item["rounds"] > 1 else ""


def _cells(item: dict[str, Any]) -> list[str]:
    bar = f"{item['bar'][0]} {number(item['bar'][1])}" if item["bar"] else ""
    peer = item["peer"]
    if item["peer_value"] is not None:
        peer += f": {number(item['peer_value'])}"
    verdict = item["verdict"]
    values = [number(item["value"]), number(item["best"]), item["unit"]]
    return [
        "  " + item["name"],
        *values,
        bar,
        verdict.upper() if verdict == MISSED else verdict,
        peer,
    ]


def _line(cells: Sequence[str]) -> str:
    name, median, best, unit, bar, verdict, peer = cells
    return f"{name:54} {median:>10} {best:>10} {unit:12} {bar:>12}  {verdict:12} {peer}".rstrip()
