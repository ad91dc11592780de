"""A history whose columns hold what they should not: SQLite keeps anything in any of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from typing import TYPE_CHECKING

import pytest

from ksym_plugin.history.reader import History
from ksym_plugin.history.schema import ADD_NODES, SCHEMA
from ksym_plugin.kernel.clocks import CLOCKS
from ksym_plugin.timeline.errors import KsymError
from tests import demo

if TYPE_CHECKING:
    from pathlib import Path

#: What a column is given, by SQL.
VALUES = (
    *("'many'", "x'00ff'", "2.5", "9223372036854775807", "-9223372036854775808", "NULL", "0"),
    "1099511627776",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "sound.db"
    path.write_bytes(demo.unpacked("ksym.db"))
    update(str(path), ADD_NODES)
    return path


def update(path: str, statement: str) -> None:
    """A column that is told to hold no such thing, or each only once, stays as it is."""
    closing = contextlib.closing(sqlite3.connect(path))
    with closing as database, contextlib.suppress(sqlite3.IntegrityError), database:
        database.execute(statement)


def columns() -> list[str]:
    """Each table and column of a history."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return [
            f"{table}.{column[1]}"
            for (table,) in tables
            for column in database.execute(f"PRAGMA table_info({table})")
        ]


def read_all(path: str) -> int:
    """All that a reader asks of a history; how many lifetimes it has."""
    count = 0
    with History(path) as history:
        for boot in history.boots():
            json.dumps(boot)
            past = history.recorded(boot)
            clocks = past.clock_map()
            for clock in filter(clocks.knows, CLOCKS):
                clocks.window(clock, 1 << 40, 1 << 41)
            past.warnings()
            lives = past.lifetimes()
            count += len(lives)
            for life in lives[::7]:
                json.dumps([life.symbol.module, life.prog_id, life.pid, life.comm])
                for at in (life.loaded_latest, past.bounds[1]):
                    past.at(life.symbol.start, at)
                past.programs.line(life, 0)
                past.programs.traced(life)
                past.programs.program_name(life)
            past.live(past.bounds[1])
    return count


def test_a_sound_history_is_read_whole(sound: Path) -> None:
    with contextlib.closing(sqlite3.connect(sound)) as database:
        (count,) = database.execute("SELECT count(*) FROM lifetime").fetchone()
    assert read_all(str(sound)) == count > 0


@pytest.mark.parametrize("column", columns())
def test_what_stands_in_a_column_is_read_or_refused(
    column: str, sound: Path, tmp_path: Path
) -> None:
    table, name = column.split(".")
    for number, value in enumerate(VALUES):
        path = str(tmp_path / f"{number}.db")
        shutil.copy(sound, path)
        update(path, f"UPDATE {table} SET {name} = {value}")
        with contextlib.suppress(KsymError):
            read_all(path)
        os.remove(path)
