"""BPF_PROG_LOAD with the probe against without: ``python3 -m bench.probe_cost``, as root.

Needs a kernel with kprobes. Both kinds of rounds alternate, so that a slow moment of the
machine meets both. Prints JSON: ns of a load by size, without and with, and what the
kernel counted for the probe's own programs.
"""

from __future__ import annotations

import json
import os
import sys
import time

from ksym_plugin.sources.probe import KprobeSource
from tests.oracle import programs, rawbpf

ROUNDS, LOADS = 3, 150
#: Instructions: a filter of two, and programs such as network data paths are made of.
SIZES = (2, 300, 3_000)


def measure(size: int) -> list[int]:
    """ns of each load of a program of some ``size`` instructions; unloads are not counted."""
    taken = []
    for number in range(LOADS):
        code = programs.insn(0xB7, imm=number) + programs.insn(0x95)
        if size > 2:
            # Twice around the loop: the verifier walks it as often.
            code = programs.burn(number, size, 2) + code
        began = time.monotonic_ns()
        fd = rawbpf.load(code, f"cost_{number}")
        taken.append(time.monotonic_ns() - began)
        os.close(fd)
    return taken


def listened() -> tuple[dict[int, list[int]], dict[str, int]]:
    """The same with the probe attached, and what it has counted.

    Nobody reads meanwhile: a recorder runs on another CPU, and an emulated guest with one
    thread for all its CPUs would charge the loader for it.
    """
    source = KprobeSource()
    try:
        source.measure()
        return {size: measure(size) for size in SIZES}, source.stats()
    finally:
        source.close()


def main() -> None:
    without: dict[int, list[int]] = {size: [] for size in SIZES}
    beside: dict[int, list[int]] = {size: [] for size in SIZES}
    stats: dict[str, int] = {}
    for _ in range(ROUNDS):
        for size in SIZES:
            without[size] += measure(size)
        taken, stats = listened()
        for size in SIZES:
            beside[size] += taken[size]
    json.dump({"without": without, "with": beside, "stats": stats}, sys.stdout)


if __name__ == "__main__":
    main()
