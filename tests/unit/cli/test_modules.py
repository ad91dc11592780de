"""Modules on the command line: kept by record, listed by show, named by resolve."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ksym_plugin.cli import record
from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import Instant
from ksym_plugin.sources import modules as modules_module
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.symbols import MODULE, Load, Symbol, Unload
from ksym_plugin.timeline.timeline import Timeline
from tests.unit import module_hosts
from tests.unit.cli.test_cli import BASE, SECOND, ksym, machine, place
from tests.unit.cli.test_record import Asked

__all__ = ["machine", "place"]


def write(path: str) -> None:
    """nf_tables at BASE from 110 to 150 s."""
    writer = HistoryWriter(path, "made up", 100 * SECOND, None)
    functions = PackedFunctions(pack_functions([(0, 64, "first"), (64, 8, "second")]))
    symbol = Symbol(BASE, BASE + 72, "nf_tables", MODULE, "nf_tables")
    timeline = Timeline()
    for change in (
        Load(symbol, 109 * SECOND, 110 * SECOND, functions=functions),
        Unload(BASE, 150 * SECOND, 150 * SECOND, "nf_tables"),
    ):
        lifetime = timeline.apply(change)
        assert lifetime is not None
        writer.note(lifetime)
    writer.cover_modules(True)
    writer.tick(Instant(100 * SECOND, 5, 10**18, 100 * SECOND))
    writer.close(200 * SECOND)


def test_show_says_what_is_a_module() -> None:
    write("ksym.db")
    for words in (("--at", "120"), ("--all",), ("--all", "nf_*")):
        (line,) = [line for line in ksym("show", *words).stdout.splitlines() if "nf_" in line]
        assert line.endswith("nf_tables (module, 2 names)")
    (entry,) = json.loads(ksym("show", "--at", "120", "--json").stdout)["symbols"]
    assert (entry["kind"], entry["module"], entry["names"]) == ("module", "nf_tables", 2)
    assert "nf_tables" not in ksym("show").stdout


@pytest.mark.parametrize(
    ("at", "offset", "answer"),
    [
        ("120", 0x44, "second+0x4 (nf_tables)"),
        ("120", 0x4, "first+0x4 (nf_tables)"),
        ("150.5", 0x4, "[unknown]  nothing was loaded at this address at that time"),
        ("300", 0x4, "[unknown]  the history does not cover that time"),
    ],
)
def test_resolve_names_a_function_of_a_module_by_the_time(
    at: str, offset: int, answer: str
) -> None:
    write("ksym.db")
    shown = ksym("resolve", "--at", at, hex(BASE + offset)).stdout
    assert shown == f"{BASE + offset:#x}  {answer}\n"


def recorded(*words: str) -> str:
    """What a recording says, that lasts as long as a command which does nothing."""
    result = ksym("record", "-o", "x.db", *words, "--", sys.executable, "-c", "")
    assert result.exit_code == 0, result.stderr
    return result.stderr


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "open_source", lambda *_: (Asked(False), []))


@pytest.mark.usefixtures("source")
def test_where_there_are_no_modules_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LISTING", "/nowhere/modules")
    assert "module" not in recorded()
    with History("x.db") as history:
        assert not history.recorded(history.boots()[0]).has_modules


@pytest.mark.usefixtures("source")
def test_where_modules_cannot_be_followed_it_is_said_and_bpf_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SourceError("the kernel hides where its modules are", "be root")

    (tmp_path / "modules").touch()
    monkeypatch.setattr(record, "LISTING", str(tmp_path / "modules"))
    monkeypatch.setattr(record, "Modules", refuse)
    messages = recorded()
    assert (
        "ksym: the history will have no modules (the kernel hides where its modules are" in messages
    )
    assert "kept in x.db" in messages


@pytest.mark.usefixtures("source")
def test_modules_are_recorded_beside_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host").mkdir()
    host = module_hosts.Host(tmp_path / "host")
    host.add("a", 1)

    def follow(earlier: list, since: int) -> modules_module.Modules:
        modules = host.follow(earlier, since)
        ask = host.reader.ask
        host.reader.ask = lambda asked: (ask(asked), host.reader.answer())[0]  # type: ignore[assignment,method-assign]
        return modules

    monkeypatch.setattr(record, "LISTING", str(host.listing))
    monkeypatch.setattr(record, "Modules", follow)
    messages = recorded()
    assert "0 changes" in messages
    assert host.uevents.is_closed
    with History("x.db") as history:
        past = history.recorded(history.boots()[0])
        assert past.has_modules
        assert [life.symbol.name for life in past.lifetimes()] == ["a"]
