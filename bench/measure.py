"""How things are measured: in turn, several rounds, in processes of their own.

Other work on the same CPUs must not count: whatever computes is measured in CPU time of
the process (``process_time``, or ``wait4`` for other programs), and only what waits for
the kernel or a disk in wall time. Each row says which.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SYSTEM_PYTHON = "/usr/bin/python3"


class Figures:
    """The same thing measured several times."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def per(self, count: float) -> Figures:
        """Each of them as ``count`` divided by it: seconds become things a second."""
        return Figures([count / value for value in self.values])

    def times(self, factor: float) -> Figures:
        return Figures([value * factor for value in self.values])

    def over(self, other: Figures) -> Figures:
        """Round by round, how many times the other's."""
        return Figures([mine / theirs for mine, theirs in zip(self.values, other.values)])

    def __len__(self) -> int:
        return len(self.values)


def in_turn(rounds: int, *prepares: Callable[[], Callable[[], object]]) -> list[Figures]:
    """CPU seconds of each work, A B A B, after one round that does not count.

    A work is what its ``prepare`` returns, made anew for each round and not measured.
    """
    taken: list[list[float]] = [[] for _ in prepares]
    for turn in range(rounds + 1):
        for prepare, values in zip(prepares, taken):
            work = prepare()
            gc.collect()
            began = time.process_time()
            work()
            if turn:
                values.append(time.process_time() - began)
            del work
    return [Figures(values) for values in taken]


def settle() -> None:
    """Take all objects there are out of the collector's rounds: they are the benchmark's."""
    gc.collect()
    gc.freeze()


def memory_mb(field: str = "VmRSS") -> float:
    """Memory this process holds, or with ``VmHWM`` the most it ever held."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


class Cost:
    """What running a program took."""

    __slots__ = ("cpu", "err", "out", "status", "wall")

    def __init__(self, cpu: float, wall: float, status: int, out: str, err: str) -> None:
        self.cpu = cpu
        self.wall = wall
        self.status = status
        self.out = out
        self.err = err


def run(command: Sequence[str], out: str, seconds: float = 300, **more: Any) -> Cost:
    """Run a program to its end, its output into the file ``out``; CPU time is user and system.

    Raises RuntimeError with what it said if it fails, subprocess.TimeoutExpired if late.
    """
    with open(out, "wb") as stdout, open(out + ".err", "wb") as stderr:
        before = children_seconds()
        began = time.perf_counter()
        child = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, **more
        )
        try:
            status = child.wait(seconds)
        except BaseException:
            child.kill()
            child.wait()
            raise
        wall = time.perf_counter() - began
        cpu = children_seconds() - before
    with open(out + ".err", encoding="utf-8", errors="replace") as file:
        err = file.read()
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}: {err[-2000:]}")
    return Cost(cpu, wall, status, out, err)


def children_seconds() -> float:
    """CPU time, user and system, of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def in_child(module: str, function: str, *arguments: Any, seconds: float = 900) -> Any:
    """``bench.<module>.<function>(*arguments)`` in a fresh interpreter; JSON both ways."""
    code = (
        "import json, sys\n"
        f"from bench.{module} import {function} as work\n"
        "answer = work(*json.loads(sys.argv[1]))\n"
        "sys.stdout.write(json.dumps(answer))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bench.{module}.{function}: {done.stderr.strip()[-4000:]}")
    return json.loads(done.stdout)
