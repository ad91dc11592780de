"""The handler as a program: under perf's Python module, and over text without it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ksym_plugin.kernel import identity
from ksym_plugin.perf.handler import Handler, Options
from ksym_plugin.perf.text import Header
from ksym_plugin.timeline.errors import KsymError
from tests import demo
from tests.unit.perf_events import CALLCHAIN, CORE, SAMPLED, VMLINUX, attr, bpf, event, node

HANDLER = os.path.join(demo.REPO, "contrib", "perf-script", "ksym_handler.py")
MODULE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "perf_module")
ADDRESS = 0xFFFF_FFFF_C010_0000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped recording: its samples, its history as one of this boot, perf's text."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "perf.data").write_bytes(demo.unpacked("events.jsonl"))
    (folder / "before.txt").write_bytes(demo.unpacked("before.txt"))
    (folder / "ksym.db").write_bytes(demo.unpacked("ksym.db"))
    with contextlib.closing(sqlite3.connect(folder / "ksym.db")) as database, database:
        database.execute("UPDATE boot SET boot_id = ?", (identity.boot_id(),))
    return folder


def run(
    place: Path, *words: str, module: bool = True, stdin: Path | None = None, status: int = 0
) -> tuple[str, str]:
    """What the handler prints, started as a program."""
    environment = {**os.environ, "PYTHONPATH": MODULE if module else ""}
    environment.pop("KSYM_HISTORY", None)
    with open(stdin or os.devnull, "rb") as text:
        done = subprocess.run(
            [sys.executable, "-B", HANDLER, *words],
            cwd=place,
            env=environment,
            stdin=text,
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode("utf-8", "surrogateescape"), done.stderr.decode()


def samples(folder: Path, *events: dict) -> Path:
    lines = [json.dumps({**one, "attr": one["attr"].hex(), "raw_buf": ""}) for one in events]
    (folder / "perf.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def names(text: str) -> list[str]:
    """Headers, and of frames their names: the module does not tell where in it a frame is."""
    lines = [line for line in text.splitlines() if line]
    return [line.split()[1].split("+")[0] if line[0] == "\t" else line for line in lines]


def test_it_can_be_started() -> None:
    assert os.access(HANDLER, os.X_OK)
    with open(HANDLER, "rb") as file:
        assert file.readline() == b"#!/usr/bin/env python3\n"


def test_the_module_s_samples_come_out_as_embedding_perf_s(place: Path, tmp_path: Path) -> None:
    recording = demo.shipped(str(tmp_path))
    out, err = run(place)
    assert names(out) == names(recording.after)
    assert out.count("_oracle_") == recording.after.count("_oracle_") > 2000
    assert err == recording.tally


@pytest.mark.parametrize("form", ["folded", "svg", "speedscope", "report"])
def test_every_format(place: Path, form: str) -> None:
    out, err = run(place, "-i", "perf.data", "--format", form)
    assert "626 renamed" in err
    if form == "folded":
        assert sum(int(line.rpartition(" ")[2]) for line in out.splitlines()) == 2321
    elif form == "svg":
        assert ET.fromstring(out).get("class") == "flame"
    else:
        assert json.loads(out)


def test_samples_without_callchains(tmp_path: Path) -> None:
    plain = attr(sample_type=SAMPLED & ~CALLCHAIN)
    one = event(attr=plain, ip=CORE + 4, symbol="start", symoff=4, dso=VMLINUX)
    other = event(attr=plain, ip=CORE + 4)
    one["callchain"] = other["callchain"] = None
    out, _ = run(samples(tmp_path, one, other))
    first, second = out.splitlines()
    assert first.endswith(f" {CORE + 4:x} start+0x4 ({VMLINUX})")
    assert f" {CORE + 4:x} " in second


def test_names_that_cannot_be_had(tmp_path: Path) -> None:
    one = event(node(0x1000, "\udcff", 4, "/x"), node(0x2000, "main", 4, "/y"), comm=None)
    out, err = run(samples(tmp_path, one), "--format", "folded")
    assert out == ":-1;main;[x] 1\n" or out == ";main;[x] 1\n"
    assert "left out" not in err


def test_a_sample_that_cannot_be_read_does_not_end_it(tmp_path: Path) -> None:
    bad = event(node(0x1000, "a", 4, "/x"))
    bad["callchain"][0]["ip"] = None
    out, err = run(samples(tmp_path, bad, event(node(0x2000, "b", 4, "/x"))))
    assert " b (/x)" in out
    assert "Traceback" not in err


def test_no_perf_data(tmp_path: Path) -> None:
    out, err = run(tmp_path, "-i", "nowhere", status=1)
    assert out == ""
    assert err.startswith("ksym: ") and err.count("\n") == 1 and "nowhere" in err


# Without the module


def test_text_is_read_where_there_is_no_module(place: Path) -> None:
    out, err = run(place, module=False, stdin=place / "before.txt")
    before = (place / "before.txt").read_text(encoding="utf-8").splitlines()
    assert len(out.splitlines()) == len(before)
    assert "626 renamed" in err
    assert out.count("_oracle_") > "\n".join(before).count("_oracle_")


def test_text_can_be_folded_and_drawn(place: Path) -> None:
    folded, _ = run(place, "--format", "folded", module=False, stdin=place / "before.txt")
    drawn, _ = run(place, "--format", "svg", module=False, stdin=place / "before.txt")
    assert "_oracle_7_[k] " in folded
    data = json.loads(ET.fromstring(drawn).find("{http://www.w3.org/2000/svg}metadata").text)
    total = sum(int(line.rpartition(" ")[2]) for line in folded.splitlines())
    assert data["boxes"][2] == total


@pytest.mark.parametrize("form", ["text", "folded", "svg", "speedscope"])
def test_text_on_a_full_disk(place: Path, form: str) -> None:
    with open(place / "before.txt", "rb") as text, open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-B", HANDLER, "--format", form],
            cwd=place,
            stdin=text,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    said = done.stderr.decode()
    assert done.returncode == 1
    assert said.startswith("ksym: the output cannot be written (No space left on device)\n")
    assert "kernel frames" in said and "Traceback" not in said and "Exception" not in said


def test_text_of_a_perf_data_is_on_its_clock(place: Path) -> None:
    handler = Handler(Options(str(place / "ksym.db"), None, "text"), None)
    first, last = 8_983_476_935_000, 8_983_476_935_999
    header = Header(b"x", b"", b"1", b"8983", b"476935", (b"", b"", b""))
    for clockid, clock in (None, "perf"), (1, "monotonic"), (7, "boottime"):
        handler.recorded.attrs = dict.fromkeys(("a", "b"), attr(clockid=clockid))
        renamer = handler.renamer()
        renamer.begin(header)
        place_of = handler._session.clock_map.to_monotonic
        assert renamer._monotonic_window() == (place_of(clock, first), place_of(clock, last))
    for clockids in (4,), (1, 7):
        handler.recorded.attrs = {str(one): attr(clockid=one) for one in clockids}
        with pytest.raises(KsymError, match="clock"):
            handler.renamer()
    handler.close()


def test_another_module_of_that_name_is_none_of_perf_s(place: Path, tmp_path: Path) -> None:
    (tmp_path / "perf.py").write_text("", encoding="utf-8")
    for name in ("before.txt", "ksym.db"):
        (tmp_path / name).write_bytes((place / name).read_bytes())
    out, _ = run(tmp_path, "--format", "folded", module=False, stdin=tmp_path / "before.txt")
    assert "_oracle_7_[k] " in out


@pytest.mark.parametrize("words", [[], ["--format", "report"]])
def test_without_anything_to_read_it_says_what_runs_it(tmp_path: Path, words: list[str]) -> None:
    out, err = run(tmp_path, *words, module=False, status=1)
    assert (out, err.count("\n")) == ("", 1)
    assert "perf script -s" in err


def test_a_report_needs_samples(place: Path) -> None:
    _, err = run(place, "--format", "report", module=False, stdin=place / "before.txt", status=1)
    assert "ksym report" in err


def test_bpf_frames_as_perf_had_them(tmp_path: Path) -> None:
    name = "bpf_prog_00000000000000aa_a"
    out, _ = run(samples(tmp_path, event(bpf(ADDRESS, name))), "--format", "folded")
    assert out in (f"demo;{name}_[k] 1\n", "demo;[unknown]_[k] 1\n")
