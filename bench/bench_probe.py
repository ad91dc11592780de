"""What the probe costs whoever loads a program: here, or else in a guest with kprobes.

The guest is a stock Debian kernel under QEMU, whose instructions are emulated: only the
ratio means anything there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from bench.measure import REPO
from bench.report import WALL, not_measured, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAME = "a load of {} instructions, with the probe"
_BAR = ("<=", 1.1)
_PMU = "/sys/bus/event_source/devices/kprobe/type"
_GUEST = "6.12"
_COST = "bench.probe_cost"
_SECONDS = 1200


def rows(quick: bool) -> list[dict[str, Any]]:
    if quick and not os.path.exists(_PMU):
        return [not_measured(_NAME.format(3000), "times", _BAR, "a guest takes minutes")]
    try:
        where, found = ("here", here()) if os.path.exists(_PMU) else (f"Linux {_GUEST}", guest())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [not_measured(_NAME.format(3000), "times", _BAR, str(error)[-300:])]
    measured = []
    for size, alone in found["without"].items():
        without, beside = statistics.median(alone), statistics.median(found["with"][size])
        note = f"{where}, {len(alone)} loads each: {without / 1e3:.0f} and {beside / 1e3:.0f} us"
        bar = None if int(size) <= 2 else _BAR
        name = _NAME.format(size)
        measured.append(row(name, beside / without, "times", bar, WALL, "without", 1.0, note))
    stats = found["stats"]
    if stats["add_runs"]:
        spent = stats["add_ns"] / stats["add_runs"] / 1e3
        measured[-1]["note"] += f"; the probe itself took {spent:.0f} us of each"
    return measured


def here() -> dict[str, Any]:
    done = _run([sys.executable, "-m", _COST])
    return _parsed(done.stdout, done.stderr)


def guest() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ksym-bench-") as folder:
        job = f"python3 -m {_COST} > /job/out/cost.json"
        vm = [os.path.join(REPO, "scripts", "vm"), "--kernel", _GUEST, "--out", folder]
        done = _run([*vm, "--shell", job])
        said = done.stdout + done.stderr
        try:
            with open(os.path.join(folder, _GUEST, "cost.json"), encoding="utf-8") as file:
                return _parsed(file.read(), said)
        except FileNotFoundError:
            raise ValueError(f"no guest: {said.strip()}") from None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=_SECONDS, cwd=REPO
    )


def _parsed(text: str, said: str) -> dict[str, Any]:
    if not text:
        raise ValueError(f"the measurement failed: {said.strip()}")
    found: dict[str, Any] = json.loads(text)
    return found
