"""``ksym record`` on a made-up source: what is passed on to it, starts that fail, and costs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ksym_plugin.cli import cli, record
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.timeline.errors import HistoryError, SourceError
from ksym_plugin.timeline.tracker import Source


class Asked(Source):
    """Opened by ``open_source``'s stand-in; says that it has a ring if it is one of those."""

    name = "made up"
    interval = 0.01

    def __init__(self, has_ring: bool) -> None:
        super().__init__()
        self.has_ring = has_ring
        self.asked: list[int | None] = []

    def read(self) -> list:
        return []

    def snapshot(self) -> list:
        return []

    def stats(self) -> dict[str, int]:
        return {"ring_bytes": 4096} if self.has_ring else {}


@pytest.mark.parametrize("has_ring", [True, False])
@pytest.mark.parametrize(("words", "size"), [((), None), (("--ring", "64K"), 65536)])
def test_the_size_reaches_the_source_or_the_user_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_ring: bool,
    words: tuple[str, ...],
    size: int | None,
) -> None:
    source = Asked(has_ring)

    def open_source(name: str, ring_bytes: int | None) -> tuple[Source, list]:
        source.asked.append(ring_bytes)
        return source, []

    monkeypatch.setattr(record, "open_source", open_source)
    history = str(tmp_path / "x.db")
    result = CliRunner().invoke(cli, ["record", "-o", history, "--for", "0.01", *words])
    assert result.exit_code == 0, result.output
    assert source.asked == [size]
    is_said = "made up has no ring to be sized: --ring changes nothing" in result.output
    assert is_said == (bool(words) and not has_ring)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_keeps_the_command_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    source, ran = Asked(False), tmp_path / "ran"

    def snapshot() -> list:
        os.kill(os.getpid(), number)
        return []

    monkeypatch.setattr(source, "snapshot", snapshot)
    monkeypatch.setattr(record, "open_source", lambda *_: (source, []))
    touch = [sys.executable, "-c", f"open({str(ran)!r}, 'w')"]
    result = CliRunner().invoke(cli, ["record", "-o", str(tmp_path / "x.db"), "--", *touch])
    assert result.exit_code == 128 + number, result.output
    assert not ran.exists()


def test_a_start_that_fails_leaves_no_history_even_where_it_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Asked(False)

    def snapshot() -> list:
        raise SourceError("the kernel does not tell")

    def close(writer: HistoryWriter, covered: int) -> None:
        writer._database.close()
        raise HistoryError("the disk is full")

    monkeypatch.setattr(source, "snapshot", snapshot)
    monkeypatch.setattr(HistoryWriter, "close", close)
    monkeypatch.setattr(record, "open_source", lambda *_: (source, []))
    result = CliRunner().invoke(cli, ["record", "-o", str(tmp_path / "x.db")])
    assert result.exit_code == 1
    assert "the kernel does not tell" in result.output
    assert not (tmp_path / "x.db").exists()


def test_ctrl_c_ends_a_source_that_takes_long_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def open_source(name: str, ring_bytes: int | None) -> tuple[Source, list]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        raise AssertionError("it went on")

    monkeypatch.setattr(record, "open_source", open_source)
    began = time.monotonic()
    # A shell has its background jobs ignore SIGINT, and so would pytest in one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = CliRunner().invoke(cli, ["record", "-o", str(tmp_path / "x.db")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.output) == (130, "")
    assert time.monotonic() - began < 20
    assert not (tmp_path / "x.db").exists()


def test_names_are_recorded_also_where_nobody_can_read_source_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "open_source", lambda *_: (Asked(False), []))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    history = tmp_path / "x.db"
    words = ["record", "-o", str(history), "--for", "0.01", "--stats"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "no source lines of BPF programs (No such file or directory)" in result.output
    assert history.exists()


# What --stats says

TRACKER = SimpleNamespace(changes=12, losses=1, resyncs=2)


def costs(counts: dict[str, int], path: Path) -> list[str]:
    path.write_bytes(b"x" * 10)
    source = SimpleNamespace(name="kprobe", stats=lambda: counts)
    return record.costs(source, TRACKER, str(path))  # type: ignore[arg-type]


def test_the_costs_of_a_source_that_counts(tmp_path: Path) -> None:
    counts = {
        "records": 12_000,
        "lost": 3,
        "ring_bytes": 4 << 20,
        "add_runs": 2_000,
        "add_ns": 3_000_000,
        "del_runs": 0,
        "del_ns": 0,
    }
    lines = costs(counts, tmp_path / "x")
    assert lines[0] == (
        "kprobe: 12 changes applied, 1 loss, 1 resync;"
        " 12000 records came, 3 were lost, the ring holds 4,096 KB"
    )
    assert lines[1] == (
        "the probe ran 2,000 times on loads (1.50 µs each) and 0 times on unloads (not measured)"
    )
    assert lines[2].endswith("10 bytes kept")


def test_the_costs_of_a_source_that_does_not_count(tmp_path: Path) -> None:
    lines = costs({}, tmp_path / "x")
    assert lines[0] == "kprobe: 12 changes applied, 1 loss, 1 resync"
    assert len(lines) == 2
