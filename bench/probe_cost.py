"""BPF_PROG_LOAD with the probe against without: ``python3 -m bench.probe_cost``, as root.

Needs a kernel with kprobes. Recorders come and go between rounds, and both kinds of
rounds alternate, so that a slow moment of the machine meets both. Prints JSON: ns of a
load by size, without and with, and what the kernel counted for the probe's own programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

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


def recorded(history: str) -> tuple[dict[int, list[int]], str]:
    """The same while ``ksym record`` listens; what it says at its end."""
    command = [sys.executable, "-m", "ksym_plugin.cli", "record", "--source", "kprobe", "--stats"]
    recorder = subprocess.Popen([*command, "-o", history], stderr=subprocess.PIPE, text=True)
    assert recorder.stderr is not None
    said = recorder.stderr.readline()
    if "recording with" not in said:
        raise SystemExit(said + recorder.stderr.read())
    try:
        taken = {size: measure(size) for size in SIZES}
    finally:
        recorder.terminate()
        _, said = recorder.communicate(timeout=120)
    return taken, said


def main() -> None:
    without: dict[int, list[int]] = {size: [] for size in SIZES}
    beside: dict[int, list[int]] = {size: [] for size in SIZES}
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for size in SIZES:
                without[size] += measure(size)
            taken, said = recorded(os.path.join(folder, "cost.db"))
            for size in SIZES:
                beside[size] += taken[size]
    probe = next((line for line in said.splitlines() if "the probe ran" in line), "")
    json.dump({"without": without, "with": beside, "probe": probe}, sys.stdout)


if __name__ == "__main__":
    main()
