"""The recorder and what it is told of programs: after their names, and never instead."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ksym_plugin.timeline.packed import digest_of
from ksym_plugin.timeline.program import GONE, ProgramDetails, pack_lines
from ksym_plugin.timeline.symbols import UNNAMED_BPF
from tests.unit.helpers import BASE, load
from tests.unit.history.test_recorder import Stage, stage

__all__ = ["stage"]
NAME = "bpf_prog_00000000000000aa_whole_name"


class Details:
    """Tells what it was given, once; ``ends`` when asked for the rest."""

    def __init__(self) -> None:
        self.waiting: list[ProgramDetails] = []
        self.last: list[ProgramDetails] = []
        self.reading, self.writing = os.pipe()

    def fileno(self) -> int:
        return self.reading

    def read(self) -> list[ProgramDetails]:
        told, self.waiting = self.waiting, []
        return told

    def finish(self) -> list[ProgramDetails]:
        return self.read() + self.last


@pytest.fixture
def details(stage: Stage) -> Any:
    found: Any = Details()
    stage.follow(details=found)
    yield found
    os.close(found.reading)
    os.close(found.writing)


def program(stage: Stage, prog_id: int) -> ProgramDetails:
    known = ProgramDetails(prog_id, "")
    known.tag, known.load_time = "00000000000000aa", stage.time.now
    known.functions = [(BASE, 0x300, NAME)]
    known.lines = pack_lines([[(0, 12, "a.bpf.c", "return 0;")]])
    known.digest = digest_of(known.lines)
    return known


def announce(stage: Stage, name: str, prog_id: int | None) -> None:
    stage.kernel.waiting.append(load(BASE, 0x300, name, stage.time.monotonic_ns(), prog_id))


def test_a_name_and_its_lines_are_kept_in_one_step(stage: Stage, details: Details) -> None:
    stage.recorder.start()
    details.waiting.append(program(stage, 5))
    announce(stage, UNNAMED_BPF, None)
    stage.recorder.step()
    stage.recorder.finish()
    past = stage.past()
    (lifetime,) = past.lifetimes()
    assert (lifetime.symbol.name, lifetime.prog_id) == (NAME, 5)
    line = past.programs.line(lifetime, 8)
    assert line is not None
    assert (line.file, line.line) == ("a.bpf.c", 12)


def test_what_comes_at_the_end_is_kept_too(stage: Stage, details: Details) -> None:
    stage.recorder.start()
    announce(stage, NAME, 5)
    stage.recorder.step()
    details.last.append(program(stage, 5))
    details.last[0].load_time -= 10**9
    stage.recorder.finish()
    past = stage.past()
    assert past.programs.line(past.lifetimes()[0], 0) is not None


def test_a_program_that_was_gone_keeps_its_name(stage: Stage, details: Details) -> None:
    stage.recorder.start()
    announce(stage, NAME, 5)
    details.waiting.append(ProgramDetails(5, GONE))
    stage.recorder.step()
    stage.recorder.finish()
    past = stage.past()
    (lifetime,) = past.lifetimes()
    known = past.programs.of(lifetime)
    assert lifetime.symbol.name == NAME
    assert known is not None
    assert (known.problem, past.programs.line(lifetime, 0)) == (GONE, None)


def test_the_end_of_the_news_does_not_end_the_recording(stage: Stage, details: Details) -> None:
    stage.recorder.start()
    stop, _stopping = os.pipe()
    stage.recorder.run(stage.time.now + 1, stop)
    details.fileno = lambda: -1  # type: ignore[method-assign]
    announce(stage, NAME, 5)
    os.write(_stopping, b"x")
    stage.recorder.run(None, stop)
    assert [life.symbol.name for life in stage.recorder.timeline.live()] == [NAME]
    os.close(stop)
    os.close(_stopping)
