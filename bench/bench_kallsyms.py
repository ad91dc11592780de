"""What loading a kallsyms table costs beside the bare read of the same file, what it
holds, and what a look-up costs. Peers: ``open().read()`` and the usual table in Python,
one tuple a symbol.

Run as a program it prints a table; ``run()`` gives the rows. A figure is the best of
several runs, taken in turn with its peer's. Memory is that of a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)

from ksym_plugin.errors import KallsymsError  # noqa: E402
from ksym_plugin.kallsyms import Kallsyms  # noqa: E402

TABLE = "/proc/kallsyms"
ROUNDS = 9
LOOK_UPS = 50_000
MEASURE = """
import json, sys
def kb(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
from ksym_plugin.kallsyms import Kallsyms
open("/proc/version", "rb").close()
before = kb("VmRSS:"), kb("VmHWM:")
if sys.argv[2] == "ours":
    table = Kallsyms.load(sys.argv[1])
else:
    table = [
        (int(fields[0], 16), fields[1], fields[2], fields[3] if len(fields) > 3 else None)
        for fields in (line.split() for line in open(sys.argv[1]))
    ]
print(json.dumps([kb("VmRSS:") - before[0], kb("VmHWM:") - before[1], len(table)]))
"""


def bare_read(path: str) -> None:
    with open(path, "rb") as file:
        file.read()


def times(path: str) -> tuple[float, float]:
    """Milliseconds of the bare read and of a load, best of ROUNDS in turn."""
    read, load = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        bare_read(path)
        read.append(time.perf_counter() - start)
        start = time.perf_counter()
        table = Kallsyms.load(path)
        load.append(time.perf_counter() - start)
        del table  # outside the measured time: a profiler frees it at its end
    return min(read) * 1e3, min(load) * 1e3


def memory(path: str, which: str) -> tuple[float, float, int]:
    """MB held after the load and at its peak, and symbols, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, which],
        env={**os.environ, "PYTHONPATH": REPO},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    held, peak, count = json.loads(done.stdout)
    return held / 1024, peak / 1024, count


def look_up(table: Kallsyms) -> float:
    """Microseconds of one look-up, over distinct addresses spread over kernel text."""
    start = table.text_start or 0xFFFFFFFF81000000
    pick = random.Random(1)
    addresses = [start + pick.randrange(1 << 24) for _ in range(LOOK_UPS)]
    began = time.perf_counter()
    for address in addresses:
        table.find(address)
    return (time.perf_counter() - began) / LOOK_UPS * 1e6


def run(path: str = TABLE) -> list[dict[str, Any]]:
    """Rows of name, value, unit, bar (what the project promises) and peer."""
    try:
        table = Kallsyms.load(path)
    except KallsymsError as error:
        return [{"name": f"kallsyms: {error}", "value": None, "unit": "", "bar": "", "peer": ""}]
    read, load = times(path)
    held, peak, count = memory(path, "ours")
    plain, plain_peak, _ = memory(path, "tuples")

    def row(name: str, value: float, unit: str, bar: str = "", peer: str = "") -> dict[str, Any]:
        return {"name": name, "value": round(value, 2), "unit": unit, "bar": bar, "peer": peer}

    bare = f"bare read {read:.1f} ms"
    return [
        row(f"kallsyms: load of {count:,} symbols", load, "ms", f"<= {2 * read:.1f}", bare),
        row("kallsyms: load against bare read", load / read, "times", "<= 2", bare),
        row("kallsyms: memory held", held, "MB", "<= 16 for 122,000", f"tuples {plain:.1f} MB"),
        row("kallsyms: memory at its peak", peak, "MB", "", f"tuples {plain_peak:.1f} MB"),
        row("kallsyms: one look-up", look_up(table), "us"),
    ]


if __name__ == "__main__":
    for line in run():
        figure = "-" if line["value"] is None else f"{line['value']:.2f} {line['unit']}"
        print(f"{line['name']:45} {figure:>12}   {line['bar']:18} {line['peer']}")
