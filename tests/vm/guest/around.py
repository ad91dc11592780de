"""A process under ``ksym record`` and ``perf record -a``, and what becomes of its samples."""

from __future__ import annotations

import json
import sys

from tests.oracle import procs, truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

HANDLER = f"{procs.REPO}/contrib/perf-script/ksym_handler.py"
CLI = [sys.executable, "-m", "ksym_plugin.cli"]
#: The emulation is slow: a compilation alone takes ten seconds.
SECONDS = 240.0
SECOND = 1_000_000_000


class Recorded:
    """``tests.vm.guest.<module>`` ran, and wrote what is true into the file it was given."""

    def __init__(self, directory: Path, module: str) -> None:
        self.history, self.data = str(directory / "x.db"), str(directory / "perf.data")
        told = directory / "truth.json"
        words = [*CLI, "record", "--source", "kprobe", "-o", self.history, "--"]
        words += ["perf", "record", "-q", "-a", "-g", "-e", "cpu-clock", "-F", "999"]
        words += ["-k", "CLOCK_MONOTONIC", "-o", self.data, "--"]
        words += [sys.executable, "-m", f"tests.vm.guest.{module}", str(told)]
        procs.run(words, SECONDS)
        self.truth: dict[str, Any] = json.loads(told.read_text())
        self.script = ["perf", "script", "-i", self.data]
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
