"""The handler inside perf against perf's own stackcollapse.py, over one perf.data.

The data is recorded on the spot: the whole system at 20 kHz while BPF programs run,
files are read and Python computes, with ``ksym record`` around it. Both scripts write
folded stacks; each figure is the user and system CPU time of a whole ``perf script``,
perf's own work included, and the scripts run in turn.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

from bench.measure import REPO, Figures, run
from bench.report import not_measured, row
from tests.oracle import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ROUNDS, SAMPLES, SECONDS = 3, 150_000, 4
QUICK = (1, 1_000, 1)
_NAME = "folded output against stackcollapse.py"
_BAR = ("<=", 1.1)
_CLOCK = "user and system CPU time of perf script"
_ALL = "user and system CPU time of all processes"
_HANDLER = os.path.join(REPO, "contrib", "perf-script", "ksym_handler.py")
_OWN = "scripts/python/stackcollapse.py"
#: Brendan Gregg's FlameGraph, in the folder of checkouts that $KSYM_REFERENCE names.
_PERL = os.path.join(os.environ.get("KSYM_REFERENCE", ""), "FlameGraph", "stackcollapse-perf.pl")
#: What there is to sample: a BPF program run over and over, files read, sums.
_LOAD = """
import os, sys, time
from tests.oracle import programs, rawbpf
fds = [programs.with_lines("bench", f"bench_{number}", number) for number in range(8)]
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for fd in fds:
        rawbpf.test_run(fd, 200)
    for name in os.listdir("/proc/self"):
        os.path.exists(os.path.join("/proc/self", name))
    with open("/proc/kallsyms", "rb") as file:
        file.read(200000)
    sum(number * number for number in range(20000))
"""


def rows(quick: bool) -> list[dict[str, Any]]:
    rounds, samples, seconds = QUICK if quick else (ROUNDS, SAMPLES, SECONDS)
    why = obstacle()
    if why:
        return [not_measured(_NAME, "times", _BAR, why)]
    with tempfile.TemporaryDirectory(prefix="ksym-bench-") as folder:
        data = os.path.join(folder, "perf.data")
        history = os.path.join(folder, "ksym.db")
        found = record(data, history, seconds, samples)
        return [*compared(folder, data, history, rounds, found), fold(folder, rounds)]


def obstacle() -> str:
    """Why this cannot be measured here; empty if it can."""
    if os.geteuid():
        return "needs root"
    if shutil.which("perf") is None:
        return "there is no perf"
    if not os.path.exists(own_script()):
        return f"this perf has no {_OWN}"
    state, reason = probe.ask()
    return "" if state == probe.ANSWERS else reason


def own_script() -> str:
    done = subprocess.run(["perf", "--exec-path"], capture_output=True, text=True, check=True)
    return os.path.join(done.stdout.strip(), _OWN)


def record(data: str, history: str, seconds: int, samples: int) -> int:
    """Record until there are enough samples, in longer and longer attempts; how many."""
    count = 0
    for _ in range(4):
        perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "20000", "-g", "-a", "-o", data]
        load = [sys.executable, "-c", _LOAD, str(seconds)]
        ksym = [sys.executable, "-m", "ksym_plugin.cli", "record", "-o", history, "--"]
        run([*ksym, *perf, "--", *load], data + ".log", 180, cwd=REPO)
        count = count_samples(data)
        if count >= samples:
            break
        seconds = seconds * min(4, max(2, samples // max(count, 1) + 1))
    return count


def count_samples(data: str) -> int:
    command = ["perf", "script", "-i", data, "-F", "time"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    count = sum(1 for _ in child.stdout)
    child.wait(120)
    return count


def compared(
    folder: str, data: str, history: str, rounds: int, samples: int
) -> list[dict[str, Any]]:
    perf = ["perf", "script", "-i", data]
    script = [sys.executable, "-m", "ksym_plugin.cli", "script", "-i", data, "-H", history]
    commands = {
        "own": [*perf, "-s", own_script()],
        "folded": [*perf, "-s", _HANDLER, "--", "-H", history, "--format", "folded"],
        "text": [*perf, "-s", _HANDLER, "--", "-H", history],
        "lined": [*perf, "-s", _HANDLER, "--", "-H", history, "--lines"],
        "plain": perf,
        "script": script,
        "stacks": [*script, "--format", "folded"],
        "report": [sys.executable, "-m", "ksym_plugin.cli", "report", "-i", data, "-H", history],
        "counted": [*perf, "-s", _HANDLER, "--", "-H", history, "--format", "report"],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    lasted: dict[str, list[float]] = {name: [] for name in commands}
    tally = ""
    for turn in range(rounds + 1):
        for name, command in commands.items():
            cost = run(command, os.path.join(folder, name))
            if turn:
                taken[name].append(cost.cpu)
                lasted[name].append(cost.wall)
            if name == "folded":
                tally = cost.err
    own, folded, text, lined, plain, script_text, stacks, report, counted = (
        Figures(taken[name]) for name in commands
    )
    wall = Figures(lasted["script"]).over(Figures(lasted["plain"]))
    summary = next((line for line in tally.splitlines() if "kernel frames" in line), "no tally")
    return [
        row(
            _NAME,
            folded.over(own),
            "times",
            _BAR,
            _CLOCK,
            "stackcollapse.py",
            1.0,
            f"{samples:,} samples; {summary}",
        ),
        row("  folded output", folded, "s", None, _CLOCK, "stackcollapse.py", own.median),
        row("  text output", text, "s", None, _CLOCK, "perf script, no Python", plain.median),
        row("  the same with --lines", lined, "s", None, _CLOCK, "without", text.median),
        row(
            "ksym script --format folded",
            stacks.over(own),
            "times",
            ("<=", 0.5),
            _ALL,
            "perf script -s stackcollapse.py",
            1.0,
            "perf script's text, counted",
        ),
        row(
            "ksym script",
            script_text.over(plain),
            "times",
            ("<=", 2.0),
            _ALL,
            "perf script",
            1.0,
            "perf script's text, repaired",
        ),
        row("  the same", wall, "times", ("<=", 1.3), "wall time", "perf script", 1.0, ""),
        row(
            "ksym report against the handler's",
            report.over(counted),
            "times",
            ("<=", 0.25),
            _ALL,
            "--format report",
            1.0,
            "perf.data is read directly",
        ),
    ]


def fold(folder: str, rounds: int) -> dict[str, Any]:
    """ksym fold of perf script's text, which ``compared`` has left, on one core."""
    name, bar = "ksym fold against stackcollapse-perf.pl", (">=", 8.0)
    if not os.path.exists(_PERL):
        return not_measured(name, "times", bar, "$KSYM_REFERENCE names no folder with FlameGraph")
    plain = os.path.join(folder, "plain")
    commands = {
        "perl": ["perl", _PERL, plain],
        "fold": [sys.executable, "-m", "ksym_plugin.cli", "fold", "--jobs", "1", plain],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for each, command in commands.items():
            cost = run(command, os.path.join(folder, each))
            if turn:
                taken[each].append(cost.cpu)
    ours, theirs = (Figures(taken[each]) for each in ("fold", "perl"))
    note = f"{os.path.getsize(plain) / 1e6:.0f} MB of text"
    return row(name, theirs.over(ours), "times", bar, _ALL, "stackcollapse-perf.pl", 1.0, note)
