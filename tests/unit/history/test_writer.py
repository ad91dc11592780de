"""Writers: one at a time, killed ones, later ones, and readers beside them."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksym_plugin.history.reader import BootHistory, History
from ksym_plugin.history.schema import HEARTBEAT
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import Instant
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.timeline.symbols import AMONG_BPF, GRACE, OUTSIDE_HISTORY, Lifetime, Loss
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, row_of, timeline_of, told, unload

REPO = Path(__file__).resolve().parents[3]
A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"

#: Commits A up to 100, notes B, says so, and waits to be killed.
WRITER = f"""
import sys
from ksym_plugin.history.writer import HistoryWriter
from tests.unit.helpers import BASE, load, timeline_of
writer = HistoryWriter(sys.argv[1], "test", 10, None)
first, second = timeline_of(
    load(BASE, 64, {A!r}, 20, 1), load(BASE + 64, 64, {B!r}, 120, 2)
).lifetimes()
writer.note(first)
writer.commit(100)
writer.note(second)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "h.db")


@pytest.fixture
def child(path: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that is recording."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def only_past(history: History) -> BootHistory:
    (boot,) = history.boots()
    return history.recorded(boot)


def new_lifetime(number: int, ended: int | None = None) -> Lifetime:
    start = BASE + 0x1000 * number
    changes = [load(start, 0x1800, A, 5, number)]
    if ended is not None:
        changes.append(unload(start, ended))  # type: ignore[arg-type]
    (lifetime,) = timeline_of(*changes).lifetimes()
    return lifetime


def test_second_writer_is_refused_while_the_first_lives(
    path: str, child: subprocess.Popen[str]
) -> None:
    with pytest.raises(HistoryError, match=f"process {child.pid}"):
        HistoryWriter(path, "test", 200, None)
    with History(path) as history:
        (session,) = only_past(history).sessions
        assert (session.writing, session.closed, session.killed) == (True, False, False)
        assert session.covered == 100
    child.kill()
    child.wait()
    HistoryWriter(path, "test", 200, None).close(201)


def test_same_process_is_a_second_writer_too(path: str) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    with pytest.raises(HistoryError, match=str(os.getpid())):
        HistoryWriter(path, "test", 1, None)
    writer.note(new_lifetime(1))
    writer.close(10)
    with History(path) as history:
        assert len(only_past(history).lifetimes()) == 1


def test_killed_writer_loses_what_it_had_not_committed_and_it_shows(
    path: str, child: subprocess.Popen[str]
) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with History(path) as history:
        past = only_past(history)
        (session,) = past.sessions
        assert session.killed
        assert (session.started, session.covered) == (10, 100)
        assert [one.symbol.name for one in past.lifetimes()] == [A]
        assert told(past.at(BASE, 100)) == f"{A} exact"
        assert past.at(BASE, 101) == (None, OUTSIDE_HISTORY)
        assert "killed" in past.warnings()[0]


def test_later_session_continues_lifetimes(path: str, child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    writer = HistoryWriter(path, "test", 200, None)
    assert writer.covered_before == 100
    timeline = Timeline()
    (before,) = writer.earlier
    timeline.enter(before)
    assert timeline.apply(load(BASE, 64, A, (0, 210), 1)) is before
    writer.note(before)
    writer.commit(220)
    timeline.apply(unload(BASE, 230, A, 1))
    writer.note(before)
    writer.close(250)
    with History(path) as history:
        past = only_past(history)
        assert [row_of(one) for one in past.lifetimes()] == [
            (BASE, BASE + 64, A, (20, 20), (230, 230), 1)
        ]
        assert told(past.at(BASE, 240)) == f"{A} {GRACE}"
        assert [session.killed for session in past.sessions] == [True, False]


def test_other_boots_writer_and_lifetimes_do_not_count(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of an earlier boot may have had the number of a living one."""
    monkeypatch.setattr(identity, "boot_id", lambda: "an earlier one")
    writer = HistoryWriter(path, "test", 1, None)
    writer.note(new_lifetime(1))
    writer.commit(10)
    writer._database.close()
    monkeypatch.undo()
    later = HistoryWriter(path, "test", 1, None)
    assert (later.earlier, later.covered_before) == ([], 0)
    later.close(10)
    with History(path) as history:
        first, _ = history.boots()
        assert history.recorded(first).sessions[0].killed


def test_reader_sees_each_commit_while_the_writer_works(path: str) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    writer.commit(10)
    with History(path) as history:
        boot = history.boots()[0]
        for number in range(5):
            past = history.recorded(boot)
            assert len(past.lifetimes()) == number
            assert past.sessions[0].covered == 10 + number
            writer.note(new_lifetime(number))
            assert len(past.lifetimes()) == number
            writer.commit(11 + number)
        before = time.monotonic()
        writer.close(99)
        assert time.monotonic() - before < 3, "a reader must not hold up the end"
        past = history.recorded(boot)
        assert past.sessions[0].closed
        assert len(past.lifetimes()) == 5


def test_wait_covered_returns_with_the_commit_that_covers(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    writer.commit(10)
    with History(path) as history:
        past = only_past(history)
        assert past.at(BASE + 0x1000, 20) == (None, OUTSIDE_HISTORY)
        extent = past.extent
        writer.note(new_lifetime(1))
        monkeypatch.setattr(time, "sleep", lambda _: writer.commit(30))
        past.wait_covered(20)
        assert told(past.at(BASE + 0x1000, 20)) == f"{A} exact"
        assert past.extent > extent
    writer.close(40)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE lifetime SET size = 'wide'",
        # The number of a process is a part of a path in /proc.
        "UPDATE session SET closed = 0, writer_pid = '../etc', writer_start = 1",
    ],
)
def test_a_row_that_is_damaged_is_said_before_anything_is_recorded(path: str, damage: str) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    writer.note(new_lifetime(1))
    writer.close(10)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(damage)
    with pytest.raises(HistoryError, match="cannot be read"):
        HistoryWriter(path, "test", 20, None)
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM session").fetchone() == (1,)


def test_wait_covered_gives_up_on_a_writer_that_hangs_and_never_waits_for_a_dead_one(
    path: str,
) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    writer.commit(10)
    with History(path) as history:
        past = only_past(history)
        before = time.monotonic_ns()
        past.wait_covered(1 << 60)
        waited = time.monotonic_ns() - before
        assert 2 * HEARTBEAT <= waited < 20 * HEARTBEAT
    writer.close(20)
    with History(path) as history:
        past = only_past(history)
        before = time.monotonic_ns()
        past.wait_covered(1 << 60)
        assert time.monotonic_ns() - before < HEARTBEAT


def test_forget_drops_what_ended_and_no_longer_covers_it(path: str) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    for number, ended in enumerate((20, 50, None)):
        writer.note(new_lifetime(number, ended))
    writer.lost(Loss(12, 14, "test"))
    writer.lost(Loss(30, 45, "test"))
    for now in (5, 25, 35, 55):
        writer.tick(Instant(now, now, now, now))
    writer.commit(100)
    writer.forget(40)
    writer.close(110)
    with History(path) as history:
        past = only_past(history)
        assert [one.prog_id for one in past.lifetimes()] == [1, 2]
        assert past.at(BASE + 0x1000, 39) == (None, OUTSIDE_HISTORY)
        assert told(past.at(BASE + 0x1000, 50)) == f"{A} exact"
        assert past.at(BASE, 50) == (None, AMONG_BPF)
        assert [(one.since, one.until) for one in past.losses] == [(30, 45)]
        assert [one.monotonic for one in past.clock_map()._instants] == [35, 55]
    database = sqlite3.connect(path)
    (orphans,) = database.execute(
        "SELECT count(*) FROM span WHERE lifetime NOT IN (SELECT id FROM lifetime)"
    ).fetchone()
    database.close()
    assert orphans == 0


def test_shrink_drops_earlier_boots_first_then_what_ended_first(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "boot_id", lambda: "an earlier one")
    earlier = HistoryWriter(path, "test", 1, None)
    for number in range(200):
        earlier.note(new_lifetime(number))
    earlier.close(10)
    monkeypatch.undo()
    writer = HistoryWriter(path, "test", 1, None)
    for number in range(2000):
        writer.note(new_lifetime(number, 10 + number if number < 1000 else None))
    writer.commit(5000)
    most = writer._used_bytes() - 60_000
    writer.shrink(most)
    assert writer._used_bytes() <= most
    (kept,) = writer._execute("SELECT count(*), min(unloaded), max(unloaded) FROM lifetime")
    assert 1000 < kept[0] < 2000
    assert 10 < kept[1] < kept[2] == 1009
    writer.shrink(0)  # what is live is kept, however little is allowed
    writer.close(5000)
    with History(path) as history:
        past = only_past(history)
        assert past.boot.boot_id == identity.boot_id()
        assert len(past.lifetimes()) == 1000
        assert {one.unloaded_latest for one in past.lifetimes()} == {None}
        assert past.at(BASE, 500) == (None, OUTSIDE_HISTORY)


def test_failed_commit_can_be_tried_again(path: str) -> None:
    writer = HistoryWriter(path, "test", 1, None)
    writer._database.execute("PRAGMA busy_timeout = 0")
    lifetime = new_lifetime(1)
    writer.note(lifetime)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(HistoryError, match="locked"):
        writer.commit(10)
    assert writer.pending == 1
    assert lifetime.row == 0
    other.execute("ROLLBACK")
    other.close()
    writer.commit(10)
    assert (writer.pending, lifetime.row) == (0, 1)
    writer.close(20)
