"""Score the names in ``perf script`` text against what the scenario knows to be true.

Reads only what our own scenario produces: samples of the runner, whose comm is ``p<index>``
while it runs that program. Both plain perf and any script that prints perf's text format
are read the same way.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

#: What ``perf script`` is asked for where the script's own defaults do not apply.
FIELDS = "comm,tid,time,ip,sym,dso"

UNKNOWN = "[unknown]"
_HEADER = re.compile(r"^\s*(\S.*?)\s+(\d+)(?:/\d+)?\s+(?:\[\d+\]\s+)?(\d+)\.(\d{6,9}):")
_FRAME = re.compile(r"^\t\s*([0-9a-f]+) (.*?)(?:\+0x[0-9a-f]+)? \((.*)\)$")
_RUNNING = re.compile(r"^p(\d+)$")


class Frame:
    __slots__ = ("dso", "ip", "name")

    def __init__(self, ip: int, name: str, dso: str) -> None:
        self.ip = ip
        self.name = name
        self.dso = dso


class Sample:
    """``time`` is ns on the recording's clock; ``frames`` leaf first."""

    __slots__ = ("comm", "frames", "tid", "time")

    def __init__(self, comm: str, tid: int, time: int) -> None:
        self.comm = comm
        self.tid = tid
        self.time = time
        self.frames: list[Frame] = []


class Verdict:
    """One frame that lies in the program that was running."""

    __slots__ = ("expected", "frame", "index", "sample")

    def __init__(self, sample: Sample, index: int, frame: Frame, expected: str) -> None:
        self.sample = sample
        self.index = index
        self.frame = frame
        self.expected = expected

    @property
    def right(self) -> bool:
        return self.frame.name == self.expected

    @property
    def missing(self) -> bool:
        return self.frame.name == UNKNOWN

    @property
    def doubted(self) -> bool:
        """Whether it is marked as one that may be wrong."""
        return self.frame.name.endswith("?")

    @property
    def wrong(self) -> bool:
        return not self.right and not self.missing


class Score:
    """Of the frames looked at: how many have the true name, another one, or none.

    Of the ``wrong`` ones ``doubted`` are marked as names that may be wrong.
    """

    __slots__ = ("doubted", "missing", "right", "total", "verdicts", "wrong")

    def __init__(self, verdicts: list[Verdict]) -> None:
        self.verdicts = verdicts
        self.total = len(verdicts)
        self.right = sum(verdict.right for verdict in verdicts)
        self.wrong = sum(verdict.wrong for verdict in verdicts)
        self.missing = sum(verdict.missing for verdict in verdicts)
        self.doubted = sum(verdict.doubted for verdict in verdicts)

    @property
    def share_right(self) -> float:
        return self.right / self.total if self.total else 0.0

    def __str__(self) -> str:
        shown = f"{self.total}: {self.right} right, {self.wrong} wrong, {self.missing} missing"
        shown += f" ({self.doubted} of the wrong marked)" if self.doubted else ""
        for verdict in [verdict for verdict in self.verdicts if verdict.wrong][:5]:
            shown += f"\n  {verdict.frame.ip:#x} is {verdict.expected}, not {verdict.frame.name}"
        return shown


def samples(text: str) -> Iterator[Sample]:
    """Every sample that has a header we know; frames without a name are UNKNOWN."""
    sample: Sample | None = None
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            if sample is not None:
                sample.frames.append(Frame(int(frame[1], 16), frame[2] or UNKNOWN, frame[3]))
            continue
        if sample is not None:
            yield sample
        header = _HEADER.match(line)
        sample = None
        if header is not None:
            time = int(header[3]) * 1_000_000_000 + int(header[4].ljust(9, "0"))
            sample = Sample(header[1], int(header[2]), time)
    if sample is not None:
        yield sample


def leaves(text: str, truth: dict[str, Any]) -> Score:
    """The samples whose leaf lies in the program that the runner was running."""
    return Score([v for v, depth in _verdicts(text, truth) if depth == 0])


def frames(text: str, truth: dict[str, Any]) -> Score:
    """Every frame, leaf or caller, that lies in the program that was running."""
    return Score([v for v, _ in _verdicts(text, truth)])


def _verdicts(text: str, truth: dict[str, Any]) -> Iterator[tuple[Verdict, int]]:
    programs = {program["comm"]: program for program in truth["programs"]}
    for sample in samples(text):
        if sample.tid != truth["tid"] or not _RUNNING.match(sample.comm):
            continue
        program = programs[sample.comm]
        for depth, frame in enumerate(sample.frames):
            for start, end, name in program["symbols"]:
                # A caller's address is the one after its call, at the utmost the end.
                if start <= frame.ip < end + (depth > 0):
                    yield Verdict(sample, program["index"], frame, name), depth
                    break


def strays(text: str, truth: dict[str, Any], slack: int = 2_000) -> list[Sample]:
    """Samples that speak against the comm as a witness; there should be none.

    A leaf in some program of the scenario while no program or another one ran, or (where the
    recording is on CLOCK_MONOTONIC, so that times compare) outside the run by more than
    ``slack`` ns.
    """
    return [sample for sample in samples(text) if _is_stray(sample, truth, slack)]


def _is_stray(sample: Sample, truth: dict[str, Any], slack: int) -> bool:
    if sample.tid != truth["tid"] or not sample.frames:
        return False
    leaf = sample.frames[0].ip
    inside = [
        program
        for program in truth["programs"]
        if any(start <= leaf < end for start, end, _ in program["symbols"])
    ]
    if not inside:
        return False
    running = [program for program in inside if program["comm"] == sample.comm]
    if not running:
        return True
    began, ended = running[0]["run"]
    on_clock = truth.get("clock") == "mono"
    return on_clock and not began - slack <= sample.time <= ended + slack
