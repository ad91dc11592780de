"""Workloads under ``ksym record`` and ``perf record -a``, and what becomes of their samples.

``python3 -m tests.vm.guest.around FOLDER`` runs them one after the other. Each is sampled only
where it asks to be: an emulated machine takes long to set things up, and longer still to read
samples of that.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from tests.oracle import perfctl, procs, truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

HANDLER = f"{procs.REPO}/contrib/perf-script/ksym_handler.py"
CLI = [sys.executable, "-m", "ksym_plugin.cli"]
#: The emulation is slow: a compilation alone takes ten seconds.
SECONDS = 240.0
SECOND = 1_000_000_000
WORKLOADS = ("images", "classic", "outliving")
_HISTORY = "x.db"


@contextlib.contextmanager
def sampled(data: str, frequency: int) -> Iterator[None]:
    """All tasks of the machine but the idle ones, on CLOCK_MONOTONIC."""
    target = ["-a", "-F", str(frequency)]
    perf = perfctl.Recording(data, "mono", target, event="cpu-clock:I")
    try:
        yield
    finally:
        perf.stop()


def record(folder: Path) -> None:
    """One recorder for all of them: compiling its probe takes longer than they do."""
    words = [*CLI, "record", "--source", "kprobe", "-o", str(folder / _HISTORY), "--"]
    procs.run([*words, sys.executable, "-m", "tests.vm.guest.around", str(folder)], SECONDS)


class Recorded:
    """``tests.vm.guest.<workload>`` ran, and wrote what is true into the file it was given."""

    def __init__(self, folder: Path, workload: str) -> None:
        self.history, data = str(folder / _HISTORY), str(folder / f"{workload}.data")
        self.truth: dict[str, Any] = json.loads((folder / f"{workload}.json").read_text())
        self.script = ["perf", "script", "-i", data]
        done = procs.run([*self.script, "-s", HANDLER, "--", "-H", self.history], SECONDS)
        self.said = done.err
        #: All samples, under the names that the handler gives.
        self.samples = list(truth.samples(done.out))

    def frames(self, start: int, end: int) -> list[truth.Frame]:
        """All frames within a range; a caller's address is the one after its call."""
        return [
            frame
            for sample in self.samples
            for depth, frame in enumerate(sample.frames)
            if start <= frame.ip - (depth > 0) < end
        ]

    def resolve(self, at: int, *addresses: int) -> list[dict[str, Any]]:
        """What ``ksym resolve`` says of CLOCK_MONOTONIC ns."""
        words = [*CLI, "resolve", "-H", self.history, "--clock", "monotonic", "--json"]
        words += ["--at", f"{at // SECOND}.{at % SECOND:09}", *map(hex, addresses)]
        answers: list[dict[str, Any]] = json.loads(procs.run(words, SECONDS, status=None).out)
        return answers


def main() -> None:
    folder = Path(sys.argv[1])
    for workload in WORKLOADS:
        words = [sys.executable, "-m", f"tests.vm.guest.{workload}"]
        words += [str(folder / f"{workload}.json"), str(folder / f"{workload}.data")]
        procs.run(words, SECONDS)


if __name__ == "__main__":
    main()
