"""A history file gives back what was written, and answers as the timeline did."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.history.reader import Boot, BootHistory, History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import Instant
from ksym_plugin.timeline.symbols import (
    AMONG_BPF,
    BPF_PROG,
    GAP,
    NOT_LOADED,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    Lifetime,
    Load,
    Loss,
    Symbol,
)
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import (
    BASE,
    Held,
    changes_of,
    histories,
    load,
    questions,
    row_of,
    timeline_of,
    told,
    unload,
)

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"
FOREVER = 1 << 62


def record(path: str, changes: list, started: int = 0, covered: int = FOREVER) -> Timeline:
    """One session that applies the changes and ends in order; its timeline."""
    writer = HistoryWriter(path, "test", started, None)
    timeline = Timeline()
    for lifetime in writer.earlier:
        timeline.enter(lifetime)
    for change in changes:
        if isinstance(change, Loss):
            writer.lost(change)
        lifetime = timeline.apply(change)
        if lifetime is not None:
            writer.note(lifetime)
        for other in timeline.take_disturbed():
            writer.note(other)
    writer.close(covered)
    return timeline


def only_past(history: History) -> BootHistory:
    (boot,) = history.boots()
    return history.recorded(boot)


def test_a_part_that_was_given_away_on_another_page_counts(tmp_path: Path) -> None:
    """Only the pages of the addresses asked about are read."""
    for start, is_taken in ((BASE + 0x2FC0, True), (BASE + 0x3000, False)):
        path = str(tmp_path / f"{start:x}.db")
        record(
            path,
            [
                load(BASE, 0x3000, A, 1_000),
                unload(BASE, 2_000),
                load(start, 0x80, B, 3_000),
            ],
        )
        with History(path) as history:
            said = told(only_past(history).at(BASE + 0x10, 4_000))
        assert said is NOT_LOADED if is_taken else said == f"{A} grace"


@pytest.mark.parametrize("nodes", [1, 4])
def test_an_area_of_bpf_is_as_large_as_the_boot_had_nodes(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "possible_nodes", lambda: nodes)
    path = str(tmp_path / "h.db")
    record(path, [load(BASE, 64, A, 1_000)])
    with History(path) as history:
        past = only_past(history)
        assert past.boot.nodes == nodes
        assert past.at(BASE + (nodes << 21) - 4096, 2_000) == (None, AMONG_BPF)
        assert past.at(BASE + ((nodes + 2) << 21), 2_000) == (None, UNKNOWN_ADDRESS)


@pytest.mark.parametrize("nodes", ["'many'", "x'00'", "2.5"])
def test_a_file_of_a_later_format_may_say_more_of_a_boot(tmp_path: Path, nodes: str) -> None:
    path = str(tmp_path / "h.db")
    record(path, [load(BASE, 64, A, 1_000)])
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE boot ADD COLUMN later TEXT DEFAULT 'x'")
        database.execute(f"UPDATE boot SET nodes = {nodes}")
    with History(path) as past:
        assert [boot.nodes for boot in past.boots()] == [1]


@pytest.mark.parametrize("address", ["'x'", "x'00'", "2.5", "NULL"])
def test_a_boot_whose_text_has_no_address_is_read(tmp_path: Path, address: str) -> None:
    path = str(tmp_path / "h.db")
    record(path, [load(BASE, 64, A, 1_000)])
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE boot SET text_start = {address}")
    with History(path) as past:
        assert [boot.text_start for boot in past.boots()] == [None]


@pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 35), reason="SQLite cannot drop a column")
def test_a_file_that_was_begun_without_nodes_is_read_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "possible_nodes", lambda: 4)
    path = str(tmp_path / "h.db")
    record(path, [load(BASE, 64, A, 1_000)], covered=5_000)
    database = sqlite3.connect(path)
    database.execute("ALTER TABLE boot DROP COLUMN nodes")
    database.commit()
    database.close()
    with History(path) as history:
        assert only_past(history).boot.nodes == 1
    record(path, [load(BASE + 64, 64, B, 6_000)], started=5_001)
    with History(path) as history:
        past = only_past(history)
        assert past.boot.nodes == 4
        assert told(past.at(BASE, 4_000)) == f"{A} exact"
        assert told(past.at(BASE + 64, 7_000)) == f"{B} exact"


_WORD = st.integers(0, (1 << 64) - 1)
_TIME = st.integers(0, FOREVER - 1)
_LIFETIME = st.tuples(
    _WORD,
    st.integers(1, 10_000),
    st.text(max_size=30),
    st.integers(0, 1 << 40),
    _TIME,
    st.one_of(st.none(), st.integers(0, 1 << 40)),
    st.one_of(st.none(), st.integers(0, (1 << 32) - 1)),
    st.booleans(),
    st.one_of(st.none(), st.text(max_size=16)),
)


def lifetime_from(row: tuple) -> Lifetime:
    start, size, name, window, latest, unloading, prog_id, open_ended, comm = row
    symbol = Symbol(start, start + size, name, BPF_PROG, "[bpf]")
    earliest = max(0, latest - window)
    lifetime = Lifetime(Load(symbol, earliest, latest, prog_id, open_ended, 7, comm))
    if unloading is not None:
        lifetime.unloaded_earliest = latest
        lifetime.unloaded_latest = latest + unloading
    return lifetime


@given(
    st.lists(_LIFETIME, max_size=6),
    st.lists(st.tuples(_TIME, _TIME, st.text(max_size=9)), max_size=4),
    st.lists(st.tuples(_TIME, _TIME, _TIME, st.one_of(st.none(), _TIME)), max_size=4),
)
@settings(max_examples=40)
def test_what_is_written_is_read_back(rows: list, gaps: list, instants: list) -> None:
    lifetimes = [lifetime_from(row) for row in rows]
    losses = [Loss(min(one, two), max(one, two), cause, 3) for one, two, cause in gaps]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "h.db")
        writer = HistoryWriter(path, "test", 5, 0xFFFFFFFF9A000000)
        for lifetime in lifetimes:
            writer.note(lifetime)
        for loss in losses:
            writer.lost(loss)
        for instant in instants:
            writer.tick(Instant(*instant))
        writer.close(FOREVER)
        with History(path) as history:
            past = only_past(history)
            assert past.boot.text_start == 0xFFFFFFFF9A000000
            back = past.lifetimes()
            assert sorted(map(str, map(whole, back))) == sorted(map(str, map(whole, lifetimes)))
            said = [(one.since, one.until, one.cause, one.count) for one in past.losses]
            assert sorted(said) == sorted((x.since, x.until, x.cause, 3) for x in losses)
            kept = [
                (one.monotonic, one.boottime, one.realtime, one.perf)
                for one in past.clock_map()._instants
            ]
            assert sorted(map(str, kept)) == sorted(map(str, instants))


def whole(one: Lifetime) -> tuple:
    symbol = one.symbol
    return (*row_of(one), symbol.kind, symbol.module, one.open_ended, one.pid, one.comm)


@given(histories(images=True), st.booleans(), st.integers(0, 60))
@settings(max_examples=40)
def test_past_answers_as_the_timeline_did(held: list[Held], gap: bool, since: int) -> None:
    """Symbols that run over a page's end and images that reach over it among them."""
    changes: list = list(changes_of(held))
    if gap:
        changes.append(Loss(100 + since, 110 + since, "test"))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "h.db")
        timeline = record(path, changes, started=-10)
        with History(path) as history:
            past = only_past(history)
            for address, time in questions(held)[::-1]:
                expected, said = timeline.at(address, time)
                found, says = past.at(address, time)
                assert says == said, f"{address:#x} at {time}"
                assert (found and row_of(found)) == (expected and row_of(expected))
            live = {row_of(one) for one in past.live(FOREVER)}
            assert live == {row_of(one) for one in timeline.live()}


def test_image_reaches_over_a_page_and_is_held_up_by_its_neighbours(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    image = load(BASE + 0xF00, 4096, "bpf_dispatcher_xdp", 10, open_ended=True)
    record(path, [image])
    with History(path) as history:
        assert told(only_past(history).at(BASE + 0x1010, 20)) == "bpf_dispatcher_xdp exact"
    record(path, [load(BASE + 0xF80, 0x40, A, 30)], started=25)
    with History(path) as history:
        # The neighbour lies on the page before the one that was asked for.
        assert only_past(history).at(BASE + 0x1010, 40)[0] is None


def test_end_that_became_known_later_is_found_on_its_pages(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    writer = HistoryWriter(path, "test", 0, None)
    timeline = timeline_of(load(BASE, 4096, A, (0, 50), 7, open_ended=True))
    (lifetime,) = timeline.lifetimes()
    writer.note(lifetime)
    writer.commit(60)
    timeline.apply(load(BASE, 0x3000, A, 40, 7))
    writer.note(lifetime)
    writer.commit(70)
    writer.close(80)
    with History(path) as history:
        assert told(only_past(history).at(BASE + 0x2FFF, 75)) == f"{A} exact"


def test_names_that_are_not_utf_8_are_kept_readable(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    odd = b"bpf_prog_00000000000000aa_\xff\xfe\x00x".decode("utf-8", "surrogateescape")
    change = load(BASE, 64, odd, 10)
    change.comm = b"\xff".decode("utf-8", "surrogateescape")
    record(path, [change])
    with History(path) as history:
        (one,) = only_past(history).lifetimes()
        assert one.symbol.name == "bpf_prog_00000000000000aa_\\udcff\\udcfe\0x"
        assert one.comm == "\\udcff"


def test_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    before = os.umask(0)
    try:
        writer = HistoryWriter(str(path), "test", 1, None)
        writer.commit(5)
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
        assert len(list(tmp_path.iterdir())) == 3  # with -wal and -shm
        writer.close(10)
    finally:
        os.umask(before)
    assert modes == {0o600}
    assert [file.name for file in tmp_path.iterdir()] == ["h.db"]


def test_look_up_never_crosses_a_boot_or_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "h.db")
    for number, (boot, host) in enumerate([("b1", "one"), ("b1", "two"), ("b2", "one")]):
        monkeypatch.setattr(identity, "boot_id", lambda boot=boot: boot)
        monkeypatch.setattr(identity, "hostname", lambda host=host: host)
        record(path, [load(BASE, 64, f"bpf_prog_{number:016x}_p", 10 * number)], covered=100)
    with History(path) as history:
        boots = history.boots()
        assert [(boot.boot_id, boot.host) for boot in boots] == [
            ("b1", "one"),
            ("b1", "two"),
            ("b2", "one"),
        ]
        for number, boot in enumerate(boots):
            assert answers(history, boot) == [f"bpf_prog_{number:016x}_p exact"]


def test_other_boots_cost_a_look_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted in steps of SQLite's virtual machine, by hundreds."""
    path = str(tmp_path / "h.db")
    steps = []
    for number in range(12):
        monkeypatch.setattr(identity, "boot_id", lambda number=number: f"boot {number}")
        changes = [load(BASE + 0x800 * at, 0x1800, A, 10 + at) for at in range(0, 400, 3)]
        record(path, changes, covered=1_000)
        if number == 1:  # As files were once begun.
            with contextlib.closing(sqlite3.connect(path)) as database:
                for name in ("lifetime_place", "span_place"):
                    database.execute(f"DROP INDEX {name}")
                database.execute("CREATE INDEX lifetime_start ON lifetime (start)")
                database.execute("CREATE INDEX span_page ON span (page)")
            assert steps_of(path, 0)
        steps.append([steps_of(path, which) for which in (0, -1)])
    assert max(steps[-1]) <= 1.2 * max(steps[0])


def steps_of(path: str, which: int) -> int:
    """What it takes to look up every page in one of the boots, the first recorded first."""
    steps = []
    with History(path) as history:
        past = history.recorded(history.boots()[which])
        history._database.set_progress_handler(lambda: steps.append(1), 100)
        for at in range(0, 400, 3):
            assert told(past.at(BASE + 0x800 * at + 0x1000, 900)) == f"{A} exact"
    return len(steps)


def answers(history: History, boot: Boot) -> list[object]:
    past = history.recorded(boot)
    names = {told(past.at(BASE + 1, time)) for time in range(10 * past.boot.row, 100)}
    assert len(past.lifetimes()) == 1
    assert len(past.live(50)) == 1
    return list(names)


def test_times_no_session_covers_are_outside(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    record(path, [load(BASE, 64, A, 10)], started=10, covered=50)
    record(path, [unload(BASE, (51, 79), A), load(BASE, 64, B, (60, 79))], 70, 90)
    with History(path) as history:
        past = only_past(history)
        said = {time: told(past.at(BASE, time)) for time in (9, 10, 50, 51, 69, 79, 90, 91)}
    assert said == {
        9: OUTSIDE_HISTORY,
        10: f"{A} exact",
        50: f"{A} exact",
        51: OUTSIDE_HISTORY,
        69: OUTSIDE_HISTORY,
        79: f"{B} exact",
        90: f"{B} exact",
        91: OUTSIDE_HISTORY,
    }


def test_what_ended_before_a_break_in_the_record_is_a_gap_after_it(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    record(path, [load(BASE, 64, A, 10), unload(BASE, 20, A)], started=5, covered=50)
    record(path, [], started=70, covered=90)
    with History(path) as history:
        past = only_past(history)
        assert told(past.at(BASE, 40)) == f"{A} grace"
        assert told(past.at(BASE, 80)) == f"{A} {GAP}"


def test_an_answer_given_before_holds_only_while_nothing_took_the_place(tmp_path: Path) -> None:
    """Asked in any order and again and again, a history answers as one that never was asked."""
    path = str(tmp_path / "ksym.db")
    changes = [
        load(BASE, 64, A, 100),
        unload(BASE, (200, 230)),
        load(BASE, 64, B, (220, 240)),
        Loss(300, 310, "test"),
        unload(BASE, 500),
        load(BASE + 32, 64, A, 600),
    ]
    record(path, changes)
    times = [*range(90, 700, 7), *range(700, 90, -11), 650, 120, 305, 210, 235, 499, 500, 501]
    with History(path) as history:
        used = history.recorded(history.boots()[-1])
        for address in (BASE, BASE + 40):
            for time in times:
                fresh = history.recorded(history.boots()[-1]).at(address, time)
                assert told(used.at(address, time)) == told(fresh), (address, time)
