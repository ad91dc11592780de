"""Recordings of py-spy and perf, those shipped too, and how far a graft of them is true."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

from ksym_plugin.cli.pyspy_record import load_info
from ksym_plugin.python import pyspy, pyspy_match
from ksym_plugin.python.pyspy_match import Matcher
from tests.oracle.phases import PROGRAM

if TYPE_CHECKING:
    from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data" / "pyspy"
NAMES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


class Recording:
    """A recording, its files laid out in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        for file in sorted((DATA / name).iterdir()):
            if file.suffix == ".xz":
                with lzma.open(file) as packed, open(folder / file.stem, "wb") as whole:
                    shutil.copyfileobj(packed, whole)
            else:
                shutil.copy(file, folder)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    @property
    def arguments(self) -> list[str]:
        return [
            *("--perf", self.path("perf.txt"), "--pyspy", self.path("pyspy.json")),
            *("--pyspy-log", self.path("pyspy.log"), "-H", self.path("ksym.db")),
        ]


class Truth:
    """What ran when, by the process itself."""

    def __init__(self, path: Path) -> None:
        with open(path, encoding="utf-8") as file:
            document: dict[str, list[Any]] = json.load(file)
        self._phases = {
            int(tid): sorted(log, key=lambda entry: entry[1]) for tid, log in document.items()
        }

    def at(self, tid: int, time: int) -> str | None:
        """The function a thread was in; None between two, and for other threads."""
        phases = self._phases.get(tid, [])
        at = bisect_right([began for _, began, _ in phases], time) - 1
        return phases[at][0] if at >= 0 and time <= phases[at][2] else None


class Score:
    """Samples with a true function: how many have a leaf given, and how many the right one."""

    def __init__(self) -> None:
        self.samples = 0
        self.given = 0
        self.right = 0
        self.bpf = 0
        self.bpf_right = 0

    def add(self, function: str, leaf: str | None, kernel: tuple[str, ...]) -> None:
        self.samples += 1
        if leaf is None:
            return
        is_right = leaf.split(" ")[0].rpartition(".")[2] == function
        self.given += 1
        self.right += is_right
        if any(PROGRAM in frame for frame in kernel):
            self.bpf += 1
            self.bpf_right += is_right


def score(folder: str | Path) -> tuple[Score, pyspy_match.Check]:
    """Sample by sample; where the self-check fails, with the leaves that --force gives.

    The folder is one of ``ksym pyspy record --keep``, with perf's text and the truth.
    """
    folder = Path(folder)
    with open(folder / "pyspy.log", "rb") as file:
        log = pyspy.parse_log(file)
    with open(folder / "pyspy.json", "rb") as file:
        profile = pyspy.load(file.read())
    info = load_info(str(folder / "session.json"))
    reader = pyspy.PerfReader()
    with open(folder / "perf.txt", "rb") as file:
        threads = pyspy_match.by_thread(reader.hits(file))
    shift = info.shift()
    assert shift is not None and reader.shift is not None
    # perf read both clocks too, UTC to the microsecond.
    assert abs(shift - reader.shift) < 100_000
    dating = pyspy_match.date(profile, log, shift, info.outer, True)
    verdict = pyspy_match.check(threads, dating.threads)
    check = verdict if verdict.passes else None
    answers = {tid: Matcher(dated, check) for tid, dated in dating.threads.items()}
    result = Score()
    truth = Truth(folder / "truth.json")
    for tid, hits in threads.items():
        for hit in hits:
            function = truth.at(tid, hit.time)
            if function is not None and not hit.is_stopped:
                found = answers[tid].at(hit) if tid in answers else None
                leaf = found.frames[-1] if found is not None and found.is_whole else None
                result.add(function, leaf, hit.kernel)
    return result, verdict
