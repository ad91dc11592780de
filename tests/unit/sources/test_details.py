"""The recorder's end of the process that reads programs, with a child that is a script."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from ksym_plugin.sources import details
from ksym_plugin.sources.details import DetailsProcess
from ksym_plugin.timeline.program import GONE, ProgramDetails

SENDS = """
import socket, sys
sys.path.insert(0, sys.argv[1])
from ksym_plugin.timeline.program import ProgramDetails
from ksym_plugin.sources.details_child import message
def fields(id, problem, lines=b""):
    known = ProgramDetails(id, problem)
    known.lines = lines
    known.functions = [(1 << 63, 16, "bpf_prog_aa_\\u00e4")]
    return [getattr(known, field) for field in ProgramDetails.__slots__]
def send(pipe, content):
    pipe.sendall(message(content))
pipe = socket.socket(fileno=int(sys.argv[2]))
"""
BIG = 3_000_000


def wait(process: DetailsProcess) -> list[ProgramDetails]:
    select.select([process], [], [], 20)
    return process.read()


def test_messages_come_whole_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"""{SENDS}
for id in range(5):
    send(pipe, fields(id, "", b"x" * ({BIG} if id == 3 else id)))
pipe.recv(1)
send(pipe, fields(9, {GONE!r}))
send(pipe, 0.25)
"""
    monkeypatch.setattr(details, "_CHILD", child)
    process = DetailsProcess()
    found: list[ProgramDetails] = []
    while len(found) < 5:
        found += wait(process)
    found += process.finish()
    assert [(known.id, len(known.lines)) for known in found] == [
        (0, 0), (1, 1), (2, 2), (3, BIG), (4, 4), (9, 0),
    ]  # fmt: skip
    assert found[0].functions == [(1 << 63, 16, "bpf_prog_aa_\u00e4")]
    assert process.fileno() == -1
    assert process.notes == []
    assert process.summary() == (
        "source lines of 5 of 6 programs (83.3 %); 0.25 s of CPU to read them"
    )


def test_waiting_ends_when_it_listens_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"{SENDS}\nsend(pipe, fields(1, ''))\nsend(pipe, True)\npipe.recv(1)"
    monkeypatch.setattr(details, "_CHILD", child)
    process = DetailsProcess()
    process.wait(30)
    assert [known.id for known in process.read()] == [1]
    process.finish()
    monkeypatch.setattr(details, "_CHILD", "")
    process = DetailsProcess()
    process.wait(30)
    assert process.finish() == []


def test_a_child_that_may_not_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "_CHILD", SENDS + "send(pipe, 'bpf(2) fails')")
    process = DetailsProcess()
    while process.fileno() >= 0:
        assert wait(process) == []
    assert process.notes == ["there will be no source lines of BPF programs: bpf(2) fails"]
    process.close()


def test_a_child_that_dies_ends_the_news_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "_CHILD", SENDS + "pipe.send(b'\\x20\\0\\0')\nsys.exit(1)")
    process = DetailsProcess()
    while process.fileno() >= 0:
        assert wait(process) == []
    assert process.finish() == []
    (note,) = process.notes
    assert "ended early" in note
    process.close()


def test_the_working_directory_s_modules_are_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "socket.py").write_text("import os; os.mkdir('was_run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(details, "_CHILD", f"{SENDS}\nsend(pipe, True)\nsend(pipe, 0.5)")
    process = DetailsProcess()
    process.finish()
    assert process.notes == []
    assert not (tmp_path / "was_run").exists()


def test_a_child_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "_LAST_WAIT", 0.2)
    monkeypatch.setattr(details, "_CHILD", "import time; time.sleep(600)")
    process = DetailsProcess()
    assert process.finish() == []
    assert process._process.poll() is not None
