"""The recorder's end of the process that reads programs, with another in its place."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest

from ksym_plugin.sources import details
from ksym_plugin.sources.details import DetailsProcess
from ksym_plugin.timeline.program import ProgramDetails
from tests.unit.sources import workers

Start = Callable[[Callable[..., None]], DetailsProcess]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the process with another function."""

    def start(function: Callable[..., None]) -> DetailsProcess:
        monkeypatch.setattr(details, "watch", function)
        return DetailsProcess()

    return start


def wait(process: DetailsProcess) -> list[ProgramDetails]:
    select.select([process], [], [], 20)
    return process.read()


def test_messages_come_whole_however_they_are_cut(start: Start) -> None:
    process = start(workers.sends_details_of_all_sizes)
    found: list[ProgramDetails] = []
    while len(found) < 5:
        found += wait(process)
    found += process.finish()
    assert [(known.id, len(known.lines)) for known in found] == [
        (0, 0), (1, 1), (2, 2), (3, workers.BIG), (4, 4), (9, 0),
    ]  # fmt: skip
    assert found[0].functions == [(1 << 63, 16, "bpf_prog_aa_\u00e4")]
    assert process.fileno() == -1
    assert process.notes == []
    assert process.summary() == (
        "source lines of 5 of 6 programs (83.3 %); 0.25 s of CPU to read them"
    )


def test_waiting_ends_when_it_listens_and_loses_nothing(start: Start) -> None:
    process = start(workers.listens_and_sends_one)
    process.wait(30)
    found = process.read()
    while not found:
        found = wait(process)
    assert [known.id for known in found] == [1]
    process.finish()
    process = start(workers.ends)
    process.wait(30)
    assert process.finish() == []


def test_a_child_that_may_not_says_why(start: Start) -> None:
    process = start(workers.is_refused)
    while process.fileno() >= 0:
        assert wait(process) == []
    assert process.notes == ["there will be no source lines of BPF programs: bpf(2) fails"]
    process.close()


def test_a_child_that_dies_ends_the_news_and_nothing_else(start: Start) -> None:
    process = start(workers.dies_within_a_message)
    while process.fileno() >= 0:
        assert wait(process) == []
    assert process.finish() == []
    (note,) = process.notes
    assert "ended early" in note
    process.close()


def test_the_working_directory_s_modules_are_not_run(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "socket.py").write_text("import os; os.mkdir('was_run')")
    monkeypatch.chdir(tmp_path)
    process = start(workers.listens_and_ends)
    process.finish()
    assert process.notes == []
    assert not (tmp_path / "was_run").exists()


def test_a_child_that_does_not_end_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "_LAST_WAIT", 0.2)
    process = start(workers.never_ends)
    assert process._worker._process is not None
    pid = process._worker._process.pid
    assert process.finish() == []
    assert not os.path.exists(f"/proc/{pid}")
