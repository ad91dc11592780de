"""Files that are no history of ours, or are broken, are refused and never altered."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

from ksym_plugin.history.reader import History
from ksym_plugin.history.schema import FORMAT
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, told

REPO = Path(__file__).resolve().parents[3]
A = "bpf_prog_00000000000000aa_a"


def make_history(path: str, count: int = 200) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    timeline = Timeline()
    for number in range(count):
        timeline.apply(load(BASE + 0x1000 * number, 0x1800, A, number + 5, number))
    for lifetime in timeline.lifetimes():
        writer.note(lifetime)
    writer.close(100_000)


def foreign(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE boot (id)")
    database.close()


def newer(path: Path) -> None:
    make_history(str(path))
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {FORMAT + 1}")
    database.close()


def older(path: Path) -> None:
    make_history(str(path))
    database = sqlite3.connect(path)
    database.execute("DROP TABLE program")
    database.execute("PRAGMA user_version = 1")
    database.close()


def text(path: Path) -> None:
    path.write_bytes(b"# captured on: Mon\n" * 40)


def short(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def header_alone(path: Path) -> None:
    make_history(str(path))
    path.write_bytes(path.read_bytes()[:100])


def truncated(path: Path) -> None:
    make_history(str(path))
    path.write_bytes(path.read_bytes()[: 3 * 4096 + 77])


def overwritten(path: Path) -> None:
    make_history(str(path))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)


def wal_overwritten(path: Path) -> None:
    """As a writer leaves it whose host lost the -wal file."""
    overwritten(path)
    data = bytearray(path.read_bytes())
    data[18:20] = b"\x02\x02"
    path.write_bytes(data)


def state_of(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


BROKEN = [foreign, newer, older, text, short, header_alone, truncated, overwritten, wal_overwritten]


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_writer_refuses_and_leaves_every_byte(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    make(path)
    before = state_of(tmp_path)
    with pytest.raises(HistoryError) as caught:
        HistoryWriter(str(path), "test", 1, None)
    assert state_of(tmp_path) == before
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def read_all(path: str) -> None:
    with History(path) as history:
        for boot in history.boots():
            past = history.recorded(boot)
            past.lifetimes()
            past.at(BASE + 0x2000, 50)


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_reader_refuses_and_leaves_every_byte(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    make(path)
    before = state_of(tmp_path)
    with pytest.raises(HistoryError):
        read_all(str(path))
    assert state_of(tmp_path) == before


def test_directory_and_absent_file_are_said(tmp_path: Path) -> None:
    for use in (History, lambda path: HistoryWriter(path, "test", 1, None)):
        with pytest.raises(HistoryError, match="directory"):
            use(str(tmp_path))
    with pytest.raises(HistoryError, match="there is no history"):
        History(str(tmp_path / "absent.db"))
    with pytest.raises(HistoryError, match="cannot be made"):
        HistoryWriter(str(tmp_path / "absent" / "h.db"), "test", 1, None)
    assert list(tmp_path.iterdir()) == []


AS_NOBODY = """
import os, sys
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
os.setgid(65534); os.setuid(65534)
for use in (History, lambda path: HistoryWriter(path, "test", 1, None)):
    try:
        use(sys.argv[1])
    except HistoryError as error:
        print(error.problem)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_unreadable_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    make_history(str(path))
    before = state_of(tmp_path)
    said = run_child(AS_NOBODY, str(path))
    assert said.stdout.count("Permission denied") == 2, said.stderr
    assert state_of(tmp_path) == before


def test_empty_file_is_made_a_history_and_is_no_history_to_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    path.touch(0o644)
    with pytest.raises(HistoryError):
        History(str(path))
    assert path.read_bytes() == b""
    make_history(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with History(str(path)) as history:
        assert len(history.boots()) == 1


def test_name_with_characters_of_a_uri(tmp_path: Path) -> None:
    path = tmp_path / "a?b#c%20d.db"
    make_history(str(path))
    with History(str(path)) as history:
        assert len(history.recorded(history.boots()[0]).lifetimes()) == 200


FULL = """
import resource, sys
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.history.writer import HistoryWriter
from tests.unit.helpers import BASE, load, timeline_of
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = HistoryWriter(sys.argv[1], "test", 1, None)
(first,) = timeline_of(load(BASE, 64, "first", 5)).lifetimes()
writer.note(first)
writer.commit(10)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
covered = 10
try:
    while True:
        covered += 1
        loads = (load(BASE + 99 * number, 64, "x" * 50, 5) for number in range(99))
        for lifetime in timeline_of(*loads).lifetimes():
            writer.note(lifetime)
        writer.commit(covered)
except HistoryError as error:
    print(covered - 1, error)
try:
    writer.close(covered)
except HistoryError:
    print("not closed")
"""


def test_full_disk_is_an_error_and_breaks_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    path = str(tmp_path / "h.db")
    said = run_child(FULL, path)
    assert "cannot be written" in said.stdout, said.stderr
    assert "free some space" in said.stdout
    committed = int(said.stdout.split()[0])
    with History(path) as history:
        past = history.recorded(history.boots()[0])
        assert past.sessions[0].covered == committed
        assert len(past.lifetimes()) == 1 + 99 * (committed - 10)
        assert told(past.at(BASE, 6)) in ("first exact", "x" * 50 + " exact")
    make_history(path)  # and it can be gone on with


def run_child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
