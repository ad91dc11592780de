"""The benchmarks run and report in the shape they promise; their figures are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.unit.helpers import BASE

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Those that need neither root nor perf nor a kallsyms.
PURE = ("timeline", "past", "change", "history", "svg", "hooks", "imports")
SHAPE = {
    "name": str,
    "unit": str,
    "verdict": str,
    "clock": str,
    "peer": str,
    "note": str,
    "rounds": int,
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", "--quick", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def report() -> dict:
    done = bench("--json", "-", *PURE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_subject_reports_rows_of_one_shape(report: dict) -> None:
    assert report["quick"] is True
    assert report["crashed"] == {}
    assert list(report["subjects"]) == list(PURE)
    for rows in report["subjects"].values():
        assert rows
        for row in rows:
            assert {key: type(row[key]) for key in SHAPE} == SHAPE
            assert row["value"] is None or row["value"] > 0


def test_a_verdict_follows_from_the_figure_and_the_bar(report: dict) -> None:
    judged = [row for rows in report["subjects"].values() for row in rows if row["bar"]]
    assert len(judged) >= 8
    for row in judged:
        sign, limit = row["bar"]
        holds = {"<=": row["value"] <= limit, ">=": row["value"] >= limit}[sign]
        assert row["verdict"] == ("met" if holds else "missed")


def test_the_table_names_every_row(report: dict) -> None:
    done = bench("change")
    assert done.returncode == 0, done.stderr
    for row in report["subjects"]["change"]:
        assert row["name"].split(",")[0] in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("bars: ")


def test_an_unknown_subject_is_refused() -> None:
    done = bench("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_the_workload_is_a_kernel_that_never_holds_two_symbols_on_one_byte() -> None:
    code = (
        "from bench.workload import crowded\n"
        "for change in crowded(300):\n"
        "    symbol = getattr(change, 'symbol', None)\n"
        "    print(change.latest, change.start if symbol is None else symbol.start,"
        " symbol.end if symbol else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    live: dict[int, int] = {}
    last = 0
    for line in done.stdout.splitlines():
        time, start, end = map(int, line.split())
        assert time > last
        last = time
        if not end:
            del live[start]
            continue
        assert all(end <= other or start >= till for other, till in live.items())
        live[start] = end
    assert live
    assert min(live) >= BASE & ~0xFFFFFF
