"""A history file of a million lifetimes on 64 pages: its size, opening it, look-ups.

Opening and the first answer are timed in fresh processes, with the file in the page
cache: from the open to the answer, in wall time, imports apart. Later look-ups are
shuffled over all pages, when each page has been read once.
"""

from __future__ import annotations

import gc
import os
import random
import sqlite3
import tempfile
import time

from bench import workload
from bench.measure import Figures, in_child, in_turn, memory_mb, settle
from bench.report import CPU, WALL, row
from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.timeline.symbols import Lifetime, Load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LIFETIMES, LOOK_UPS, ROUNDS, OPENINGS = 1_000_000, 50_000, 3, 7
QUICK = (2_000, 500, 2, 2)
_BATCH = 10_000


def lifetimes(count: int) -> Iterator[Lifetime]:
    """Ended lifetimes, as a recorder has them by the commit."""
    live: dict[int, Lifetime] = {}
    for change in workload.crowded(count):
        if isinstance(change, Load):
            live[change.symbol.start] = Lifetime(change)
            continue
        lifetime = live.pop(change.start)
        lifetime.unloaded_earliest = lifetime.unloaded_latest = change.latest
        yield lifetime
    yield from live.values()


def write(path: str, count: int) -> float:
    """Write a history, and a cross-check of how many it holds; CPU seconds of the writer."""
    writer = HistoryWriter(path, "bench", 0, None)
    spent, waiting = 0.0, []
    for lifetime in lifetimes(count):
        waiting.append(lifetime)
        if len(waiting) == _BATCH:
            spent += commit(writer, waiting)
    spent += commit(writer, waiting)
    writer.close(1 << 62)
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM lifetime").fetchone() == (count,)
    return spent


def commit(writer: HistoryWriter, waiting: list[Lifetime]) -> float:
    began = time.process_time()
    for lifetime in waiting:
        writer.note(lifetime)
    writer.commit(1)
    waiting.clear()
    return time.process_time() - began


def questions(path: str, count: int) -> list[tuple[int, int]]:
    """Addresses and times within lifetimes picked from the file by row number."""
    pick = random.Random(5)
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT start, size, loaded, unloaded FROM lifetime").fetchall()
    chosen = pick.choices([row for row in rows if row[3]], k=count)
    return [
        (start + (1 << 64) + pick.randrange(size), pick.randrange(loaded, unloaded + 1))
        for start, size, loaded, unloaded in chosen
    ]


def first_answer(path: str, address: int, when: int) -> float:
    """Seconds from opening to the first answer, without the collector, as in the handler."""
    gc.disable()
    began = time.perf_counter()
    with History(path) as history:
        lifetime, said = history.recorded(history.boots()[-1]).at(address, when)
        taken = time.perf_counter() - began
    assert lifetime is not None, said
    return taken


def look_ups(path: str, count: int, rounds: int) -> tuple[list[float], float, float]:
    """us of a look-up by round once all pages are read; ms a page took; MB held then."""
    pairs = questions(path, count)
    before = memory_mb()
    with History(path) as history:
        past = history.recorded(history.boots()[-1])
        pages = {address >> 12: (address, when) for address, when in pairs}
        began = time.process_time()
        for address, when in pages.values():
            past.at(address, when)
        reading = (time.process_time() - began) * 1e3 / len(pages)
        held = memory_mb() - before
        settle()

        def work() -> None:
            for address, when in pairs:
                past.at(address, when)

        (taken,) = in_turn(rounds, lambda: work)
    return taken.times(1e6 / count).values, reading, held


def rows(quick: bool) -> list[dict[str, Any]]:
    count, asked, rounds, openings = QUICK if quick else (LIFETIMES, LOOK_UPS, ROUNDS, OPENINGS)
    with tempfile.TemporaryDirectory(prefix="ksym-bench-") as folder:
        path = os.path.join(folder, "bench.db")
        spent = write(path, count)
        size = os.path.getsize(path)
        opened = Figures(
            [
                in_child("bench_history", "first_answer", path, address, when)
                for address, when in questions(path, openings + 1)
            ][1:]
        )
        taken, reading, held = in_child("bench_history", "look_ups", path, asked, rounds)
    crowd = f"{count:,} lifetimes on {workload.CROWD_PAGES} pages"
    return [
        row("bytes a lifetime on disk", size / count, "bytes", ("<=", 250), note=crowd),
        row("written", spent * 1e6 / count, "us each", None, CPU),
        row("opening it and the first answer", opened, "s", ("<=", 0.3), WALL, note=crowd),
        row("a look-up, its page read", Figures(taken), "us", ("<=", 20), CPU, note=crowd),
        row("the first look-up on a page", reading, "ms", None, CPU),
        row("memory with all pages read", held, "MB"),
    ]
