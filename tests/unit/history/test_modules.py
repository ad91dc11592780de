"""What a history keeps of modules: when each was there, and its functions, once for equal ones."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from ksym_plugin.history.reader import BootHistory, History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import (
    BETWEEN,
    EXACT,
    MODULE,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    VACANT,
    Frame,
    Load,
    Reason,
    Symbol,
    Unload,
)
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load

PAGE = 0x1000
ROWS = [(0, 0x40, "first"), (0, 0x40, "alias"), (0x1800, 0x900, "second")]
SIZE = 0x2100


def functions(rows: list = ROWS) -> PackedFunctions:
    return PackedFunctions(pack_functions(rows))


class Kept:
    """A history with a writer, and a timeline that it follows."""

    def __init__(self, path: str, has_modules: bool = True, started: int = 1) -> None:
        self.path = path
        self.writer = HistoryWriter(path, "test", started, None)
        self.writer.cover_modules(has_modules)
        self.timeline = Timeline()

    def load(self, name: str, page: int, time: int, rows: list = ROWS) -> None:
        start = BASE + page * PAGE
        symbol = Symbol(start, start + SIZE, name, MODULE, name)
        self.apply(Load(symbol, time - 5, time, functions=functions(rows)))

    def unload(self, name: str, page: int, time: int) -> None:
        self.apply(Unload(BASE + page * PAGE, time - 5, time, name))

    def apply(self, change: Load | Unload) -> None:
        lifetime = self.timeline.apply(change)
        assert lifetime is not None
        self.writer.note(lifetime)


def past_of(history: History) -> BootHistory:
    return history.recorded(history.boots()[-1])


def said(found: Frame | Reason) -> object:
    return (found.name, found.offset, found.module) if isinstance(found, Frame) else found


def count(path: str, table: str) -> int:
    with sqlite3.connect(path) as database:
        ((rows,),) = database.execute(f"SELECT count(*) FROM {table}")
    database.close()
    return int(rows)


def test_a_module_is_named_by_its_functions_after_it_has_gone(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.unload("m", 0, 200)
    kept.load("n", 1, 300, [(0, 0x2100, "all_of_n")])
    kept.writer.close(1000)
    with History(kept.path) as history:
        past = past_of(history)
        assert past.has_modules
        resolver = Resolver(past)
        # The second page is reached from the first, and was another's later.
        answers = [
            (BASE + 0x3F, 150, ("first", 0x3F, "m")),
            (BASE + 0x40, 150, BETWEEN),
            (BASE + 0x1804, 150, ("second", 4, "m")),
            (BASE + 0x20FF, 150, ("second", 0x8FF, "m")),
            (BASE + 0x1804, 201, VACANT),
            (BASE + 0x1804, 301, ("all_of_n", 0x804, "n")),
            (BASE + 0x3F, 301, VACANT),
            (BASE + 0x1804, 5000, OUTSIDE_HISTORY),
        ]
        for address, time, expected in answers:
            assert said(resolver.resolve(address, time)) == expected
        frame = resolver.resolve(BASE, 150)
        assert isinstance(frame, Frame)
        assert (frame.kind, frame.certainty) == (MODULE, EXACT)
        assert frame.lifetime is not None
        assert frame.lifetime.functions is not None
        assert frame.lifetime.functions.names(0) == ["first", "alias"]


@pytest.mark.parametrize("value", ["'text'", "5"])
def test_functions_that_are_no_bytes_are_refused(value: str, tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.writer.close(1000)
    with contextlib.closing(sqlite3.connect(kept.path)) as database, database:
        database.execute(f"UPDATE function_table SET data = {value}")
    with History(kept.path) as history, pytest.raises(HistoryError, match="cannot be read"):
        past_of(history).lifetimes()[0].functions.find(0)
    with pytest.raises(HistoryError, match="cannot be read"):
        HistoryWriter(kept.path, "test", 2000, None)


def test_equal_functions_are_kept_once_and_shared(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    for turn in range(20):
        kept.load("m", 4 * turn, 100 * turn + 10)
        kept.unload("m", 4 * turn, 100 * turn + 60)
        kept.writer.commit(100 * turn + 60)
    kept.load("other", 400, 3000, [(0, 64, "x")])
    kept.writer.close(4000)
    assert count(kept.path, "function_table") == 2
    assert count(kept.path, "module") == 21
    with History(kept.path) as history:
        lives = past_of(history).lifetimes("m")
        assert len(lives) == 20
        assert len({id(life.functions) for life in lives}) == 1


def test_a_late_unload_changes_the_row_and_keeps_the_functions(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.writer.commit(150)
    kept.unload("m", 0, 200)
    kept.writer.close(1000)
    with History(kept.path) as history:
        (life,) = past_of(history).lifetimes()
        assert (life.loaded_latest, life.unloaded_latest) == (100, 200)
        assert life.functions is not None
        assert life.functions.find(0) == (0, 0x40, "first")


def test_what_is_forgotten_takes_its_functions_along(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.unload("m", 0, 200)
    kept.load("n", 8, 100, [(0, 64, "x")])
    kept.load("m", 16, 100)
    kept.writer.commit(300)
    kept.writer.forget(250)
    assert (count(kept.path, "module"), count(kept.path, "function_table")) == (2, 2)
    kept.unload("m", 16, 400)
    kept.writer.commit(500)
    kept.writer.shrink(1)
    kept.writer.close(600)
    assert (count(kept.path, "module"), count(kept.path, "function_table")) == (1, 1)


def test_the_next_session_has_the_functions_of_what_is_open(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.apply(load(BASE + 0x9000, 64, "bpf_prog_00000000000000aa_a", 100, 1))
    kept.writer.close(600)
    again = Kept(kept.path, started=700)
    by_name = {life.symbol.name: life.functions for life in again.writer.earlier}
    mine = by_name["m"]
    assert mine is not None
    assert mine.is_like(functions())
    assert by_name["bpf_prog_00000000000000aa_a"] is None
    again.writer.close(800)


@pytest.mark.parametrize("has_modules", [True, False])
def test_where_modules_are_kept_the_table_of_now_says_nothing_of_them(
    tmp_path: Path, has_modules: bool
) -> None:
    kept = Kept(str(tmp_path / "h.db"), has_modules)
    kept.load("m", 0, 100)
    kept.unload("m", 0, 200)
    kept.writer.close(1000)
    table = (
        f"ffffffff81000000 T _text\n{BASE:x} t of_today\t[later]\n"
        f"{BASE + 0x100000:x} t of_today_too\t[later]\n"
    )
    with History(kept.path) as history:
        resolver = Resolver(past_of(history), Kallsyms.parse(table.encode()))
        for _ in range(2):
            gone, never = (resolver.resolve(BASE + at, 500) for at in (4, 0x100004))
            if has_modules:
                assert (gone, never) == (VACANT, UNKNOWN_ADDRESS)
            else:
                assert said(gone) == ("of_today", 4, "later")
                assert said(never) == ("of_today_too", 4, "later")
        # What the history does not cover the table may tell.
        assert said(resolver.resolve(BASE + 4, 5000)) == ("of_today", 4, "later")
        core = resolver.resolve(0xFFFF_FFFF_8100_0004, 500)
        assert isinstance(core, Frame)


def test_one_session_without_modules_leaves_them_to_the_tables(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    for started, has_modules in ((1, True), (100, False)):
        Kept(path, has_modules, started).writer.close(started + 50)
    with History(path) as history:
        past = past_of(history)
        assert [session.modules for session in past.sessions] == [True, False]
        assert not past.has_modules


def test_a_damaged_table_names_nothing(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.writer.close(1000)
    with sqlite3.connect(kept.path) as database:
        database.execute("UPDATE function_table SET data = ?", (os.urandom(64),))
    database.close()
    with History(kept.path) as history:
        assert Resolver(past_of(history)).resolve(BASE, 150) is BETWEEN
    with sqlite3.connect(kept.path) as database:
        database.execute("DELETE FROM module")
    database.close()
    with History(kept.path) as history:
        assert Resolver(past_of(history)).resolve(BASE, 150) is BETWEEN


def test_a_module_takes_little_room(tmp_path: Path) -> None:
    """1,000 functions, as nf_tables has: a tenth of what their names and places are as text."""
    rows = [(at * 0x80, 0x70, f"nft_module_function_{at * at:x}") for at in range(1000)]
    text = sum(len(f"{start:016x} t {name}\t[nf_tables]\n") for start, _, name in rows)
    assert len(pack_functions(rows)) < text / 4


def test_the_size_of_a_loading_that_came_before(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load("m", 0, 100)
    kept.unload("m", 0, 150)
    kept.writer.commit(200)
    before = os.path.getsize(kept.path)
    for turn in range(1000):
        kept.load("m", 0, 1000 + 10 * turn)
        kept.unload("m", 0, 1006 + 10 * turn)
    kept.writer.close(20_000)
    each = (os.path.getsize(kept.path) - before) / 1000
    # A row, two pages beyond the first, and the module's own.
    assert each < 200
