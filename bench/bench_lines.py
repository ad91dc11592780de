"""Deeper names: a vmlinux of 200,000 symbols, and source lines of BPF programs.

The vmlinux is made up, and read in fresh processes from the page cache, pyelftools' import
in it. The history has programs of five functions with 60 lines each, of which many share
their line table, as programs that are loaded again do. What recording them costs is the
difference between many and few under ``ksym record``, both of its processes together.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
import time

from bench.bench_history import commit
from bench.measure import REPO, Figures, in_child, run
from bench.report import CPU, WALL, not_measured, row
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import cache
from ksym_plugin.kernel.elf import ElfFile
from ksym_plugin.timeline.program import ProgramDetails, pack_lines
from ksym_plugin.timeline.symbols import BPF_PROG, Lifetime, Load, Symbol
from tests.oracle import probe
from tests.unit import elf_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SYMBOLS, PROGRAMS, TABLES, LOADS, ROUNDS = 200_000, 4_000, 40, 300, 5
QUICK = (2_000, 50, 5, 30, 2)
_FUNCTIONS, _ROWS = 5, 60
#: Between a load and its unload, and to the next one; and programs a second with it.
_PAUSES_MS = {10: "40", 2: "150"}
_COLD, _KEPT = ("<=", 3), ("<=", 0.3)
_BYTES, _COST = ("<=", 400), ("<=", 1)


def write_vmlinux(path: str, count: int) -> None:
    """Functions with names as long as a kernel's, one in twenty an alias."""
    pick = random.Random(3)
    syms = [elf_files.Sym("_text", elf_files.TEXT, 0, elf_files.NOTYPE)]
    at = elf_files.TEXT
    while len(syms) < count:
        size = min(40 + int(pick.lognormvariate(5, 1)), 60_000)
        name = "_".join(pick.choices(("get", "page", "ext4", "inode", "lock", "tcp", "rx"), k=4))
        for alias in ("", "__se_") if pick.random() < 0.05 else ("",):
            syms.append(elf_files.Sym(f"{alias}{name}_{len(syms)}", at, size))
        at += -(-size // 16) * 16
    with open(path, "wb") as file:
        file.write(elf_files.vmlinux(syms, at - elf_files.TEXT))


def ready(path: str) -> float:
    """Seconds until the first answer."""
    cache.SETTLED_NS = 0
    began = time.perf_counter()
    found = ElfFile.cached(path).find(elf_files.TEXT + 1)
    taken = time.perf_counter() - began
    assert found is not None
    return taken


def elf_rows(folder: str, count: int, rounds: int) -> list[dict[str, Any]]:
    path = os.path.join(folder, "vmlinux")
    write_vmlinux(path, count)
    taken: tuple[list[float], list[float]] = [], []
    for turn in range(rounds):
        os.environ["XDG_CACHE_HOME"] = os.path.join(folder, f"cache{turn}")
        for values in taken:
            values.append(in_child("bench_lines", "ready", path))
    note = f"{count:,} symbols"
    return [
        row("vmlinux, to the first answer", Figures(taken[0]), "s", _COLD, WALL, note=note),
        row("the same, from its cache", Figures(taken[1]), "s", _KEPT, WALL),
    ]


def write_programs(path: str, programs: int, tables: int) -> None:
    """A history of programs with lines, ``tables`` of them different."""
    tables_packed = [pack_lines(_lines(number)) for number in range(tables)]
    writer = HistoryWriter(path, "bench", 0, None)
    waiting: list[Lifetime] = []
    for number in range(programs):
        known = ProgramDetails(number + 1, "")
        known.tag, known.lines = f"{number % tables:016x}", tables_packed[number % tables]
        known.digest = (number % tables).to_bytes(16, "big")
        for function in range(_FUNCTIONS):
            start = 0xFFFF_FFFF_C000_0000 + (number * _FUNCTIONS + function) * 512
            name = f"bpf_prog_{known.tag}_function_{function}"
            symbol = Symbol(start, start + 500, name, BPF_PROG, "[bpf]")
            waiting.append(Lifetime(Load(symbol, number * 1000, number * 1000, known.id)))
            known.functions.append((start, 500, name))
        writer.note_program(known)
        if number % 100 == 99:
            commit(writer, waiting)
    commit(writer, waiting)
    writer.close(1 << 62)


def _lines(number: int) -> list[list[tuple[int, int, str, str]]]:
    pick = random.Random(number)
    return [
        [
            (
                row * 8,
                first + row,
                f"/src/{number}.bpf.c",
                f"value = mix(value, {pick.random()});",
            )
            for row in range(_ROWS)
        ]
        for first in range(10, 10 + _FUNCTIONS * _ROWS, _ROWS)
    ]


def recording(folder: str, count: int, pause: int) -> float:
    """CPU seconds of ``ksym record`` while so many programs come and go."""
    loader = [sys.executable, "-m", "bench.live_loader", str(count), str(pause), "lines"]
    history = os.path.join(folder, "live.db")
    command = [sys.executable, "-m", "ksym_plugin.cli", "record", "--stats", "-o", history]
    done = run([*command, "--", *loader], os.path.join(folder, "out"), 120, cwd=REPO)
    spent = re.findall(r"([\d.]+) s of CPU", done.err)
    if len(spent) != 2:
        raise RuntimeError(f"ksym record --stats said {done.err}")
    return sum(map(float, spent))


def live_rows(folder: str, count: int, rounds: int) -> list[dict[str, Any]]:
    what = "recording a program with lines"
    why = "needs root" if os.geteuid() else ""
    if not why:
        state, reason = probe.ask()
        why = "" if state == probe.ANSWERS else reason
    if why:
        return [not_measured(what, "ms", _COST, why)]
    few = count // 10
    found = []
    for pause, rate in _PAUSES_MS.items():
        spent = [
            recording(folder, count, pause) - recording(folder, few, pause) for _ in range(rounds)
        ]
        each = Figures(spent).times(1e3 / (count - few))
        note = "whole: load, lines and unload, in both processes, commits in it"
        found.append(row(f"{what}, {rate} a second", each, "ms", _COST, CPU, note=note))
    return found


def rows(quick: bool) -> list[dict[str, Any]]:
    symbols, programs, tables, loads, rounds = (
        QUICK if quick else (SYMBOLS, PROGRAMS, TABLES, LOADS, ROUNDS)
    )
    with tempfile.TemporaryDirectory(prefix="ksym-bench-") as folder:
        path = os.path.join(folder, "bench.db")
        write_programs(path, programs, tables)
        each = os.path.getsize(path) / (programs * _FUNCTIONS)
        note = f"{programs:,} programs of {_FUNCTIONS} functions, {tables} line tables"
        return [
            *elf_rows(folder, symbols, rounds),
            row("history with lines, a function", each, "bytes", _BYTES, note=note),
            *live_rows(folder, loads, 1 if quick else 2),
        ]
