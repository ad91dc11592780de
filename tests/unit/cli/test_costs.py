"""What ``ksym record --stats`` says, for sources that count and sources that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("click")

from ksym_plugin.cli import record

RECORDER = SimpleNamespace(changes=12, losses=1, resyncs=2)


def said(counts: dict[str, int], path: Path) -> list[str]:
    path.write_bytes(b"x" * 10)
    source = SimpleNamespace(name="kprobe", stats=lambda: counts)
    return record.lines(source, RECORDER, str(path))  # type: ignore[arg-type]


def test_a_source_that_counts(tmp_path: Path) -> None:
    counts = {
        "records": 12_000,
        "lost": 3,
        "ring_bytes": 4 << 20,
        "add_runs": 2_000,
        "add_ns": 3_000_000,
        "del_runs": 0,
        "del_ns": 0,
    }
    lines = said(counts, tmp_path / "x")
    assert lines[0] == (
        "kprobe: 12 changes applied, 1 loss, 1 resync;"
        " 12000 records came, 3 were lost, the ring holds 4,096 KB"
    )
    assert lines[1] == (
        "the probe ran 2,000 times on loads (1.50 µs each) and 0 times on unloads (not measured)"
    )
    assert lines[2].endswith("10 bytes kept")


def test_a_source_that_does_not_count(tmp_path: Path) -> None:
    lines = said({}, tmp_path / "x")
    assert lines[0] == "kprobe: 12 changes applied, 1 loss, 1 resync"
    assert len(lines) == 2
