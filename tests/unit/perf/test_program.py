"""The handler as a program: over perf script's text, which it may have to ask perf for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import Instant
from tests import demo
from tests.unit.helpers import BASE, load, timeline_of, unload
from tests.unit.perf_events import SECOND
from tests.unit.perf_files import RELEASE, SAMPLE_ID_ALL, USE_CLOCKID, PerfEvent, PerfFile

HANDLER = os.path.join(demo.REPO, "contrib", "perf-script", "ksym_handler.py")
A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"
TALLY = "kernel frames: "


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped recording: its history, and perf's text."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "before.txt").write_bytes(demo.unpacked("before.txt"))
    (folder / "ksym.db").write_bytes(demo.unpacked("ksym.db"))
    return folder


class Ended:
    """What a program printed and said."""

    def __init__(self, status: int, out: bytes, err: bytes) -> None:
        self.status = status
        self.out = out.decode("utf-8", "surrogateescape")
        self.err = err.decode()


def run(place: Path, *words: str, stdin: object = subprocess.DEVNULL, status: int = 0) -> Ended:
    """The handler, started as a program; ``stdin`` is a file, or bytes that come in a pipe."""
    environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}
    environment.pop("KSYM_HISTORY", None)
    done = subprocess.run(
        [sys.executable, "-B", HANDLER, *words],
        cwd=place,
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
        **({"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}),
    )
    ended = Ended(done.returncode, done.stdout, done.stderr)
    assert ended.status == status, ended.err
    assert "Traceback" not in ended.err
    return ended


def perf_that(folder: Path, *lines: str) -> None:
    """A perf that is a shell script."""
    script = folder / "perf"
    script.write_text("\n".join(("#!/bin/sh", *lines)), encoding="utf-8")
    script.chmod(0o755)


def test_it_can_be_started() -> None:
    assert os.access(HANDLER, os.X_OK)
    with open(HANDLER, "rb") as file:
        assert file.readline() == b"#!/usr/bin/env python3\n"


# Text


def test_text_on_standard_input(place: Path) -> None:
    before = (place / "before.txt").read_bytes()
    with open(place / "before.txt", "rb") as file:
        ended = run(place, "--clock", "perf", stdin=file)
    assert "626 renamed" in ended.err
    assert len(ended.out.splitlines()) == len(before.splitlines())
    assert ended.out.count("_oracle_") > before.count(b"_oracle_")
    assert run(place, "-i", "-", "--clock", "perf", stdin=before).out == ended.out


def test_a_clock_that_perf_s_names_do_not_show_is_asked_for(place: Path) -> None:
    """Of the 631 of them that are wrong, and 92 that are right, none shows it."""
    ended = run(place, stdin=(place / "before.txt").read_bytes(), status=1)
    assert (ended.out, ended.err.count("\n")) == ("", 1)
    assert "perf script --header" in ended.err and "--clock perf|monotonic" in ended.err


def test_text_can_be_folded_and_drawn(place: Path) -> None:
    before = (place / "before.txt").read_bytes()
    folded = run(place, "--clock", "perf", "--format", "folded", stdin=before).out
    drawn = run(place, "--clock", "perf", "--format", "svg", stdin=before).out
    assert "_oracle_7_[k] " in folded
    data = json.loads(ET.fromstring(drawn).find("{http://www.w3.org/2000/svg}metadata").text)
    total = sum(int(line.rpartition(" ")[2]) for line in folded.splitlines())
    assert data["boxes"][2] == total
    whole = run(place, "--clock", "perf", "--format", "speedscope", stdin=before).out
    assert json.loads(whole)["profiles"]


@pytest.mark.parametrize("form", ["text", "folded", "svg", "speedscope"])
def test_text_on_a_full_disk(place: Path, form: str) -> None:
    with open(place / "before.txt", "rb") as text, open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-B", HANDLER, "--clock", "perf", "--format", form],
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
    assert TALLY in said and "Traceback" not in said and "Exception" not in said


@pytest.mark.parametrize("words", [["--lines"], ["--vmlinux", "x"]])
def test_what_text_is_not_enough_for(place: Path, words: list[str]) -> None:
    ended = run(place, *words, stdin=b"", status=1)
    assert (ended.out, ended.err.count("\n")) == ("", 1)
    assert "run: ksym " in ended.err


def test_without_anything_to_read_it_says_what_runs_it(tmp_path: Path) -> None:
    ended = run(tmp_path, status=1)
    assert (ended.out, ended.err.count("\n")) == ("", 1)
    assert "perf script -s" in ended.err


# What perf recorded


def recording(folder: Path, *events: PerfEvent) -> Path:
    """A perf.data with nothing but its header, and a perf that prints the text beside it."""
    path = folder / "recorded"
    file = PerfFile(*events)
    with History(str(folder / "ksym.db")) as past:
        file.features[RELEASE] = file.string(past.boots()[0].release)
    path.write_bytes(file.file())
    perf_that(folder, 'echo "$*" > words', "cat before.txt")
    return path


def test_perf_is_asked_for_the_text_of_a_perf_data(place: Path) -> None:
    path = recording(place)
    by_text = run(place, "--clock", "perf", stdin=(place / "before.txt").read_bytes())
    by_data = run(place, "-H", "ksym.db", "-i", str(path))
    assert (by_data.out, by_data.err) == (by_text.out, by_text.err)
    assert (place / "words").read_text() == f"script -i {path} --ns\n"
    with open(path, "rb") as file:
        assert run(place, "-H", "ksym.db", stdin=file).out == by_text.out
    path.rename(place / "perf.data")
    assert run(place).out == by_text.out
    assert (place / "words").read_text() == "script -i perf.data --ns\n"
    (place / "perf.data").unlink()


def test_a_perf_data_that_comes_through_a_pipe_is_perf_s_to_read(tmp_path: Path) -> None:
    perf_that(tmp_path, 'echo "$*" > words', "cat > copy")
    file = PerfFile()
    for at in range(3000):
        file.comm(at, at, b"x" * 900)
    content = file.pipe()
    program = subprocess.Popen(
        [sys.executable, "-B", HANDLER],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
    )
    with program:
        for piece in (content[:16], content[16:40], content[40:]):
            program.stdin.write(piece)
            program.stdin.flush()
            time.sleep(0)
    assert program.returncode == 0
    assert (tmp_path / "copy").read_bytes() == content
    assert (tmp_path / "words").read_text() == "script -i - --ns\n"


@pytest.mark.parametrize("is_piped", [False, True])
@pytest.mark.parametrize(
    "clockid, ahead",
    [(time.CLOCK_MONOTONIC, 0), (time.CLOCK_BOOTTIME, 60), (None, -1)],
)
def test_the_clock_is_the_header_s(
    tmp_path: Path, clockid: int | None, ahead: int, is_piped: bool
) -> None:
    history(tmp_path / "ksym.db")
    flags = (SAMPLE_ID_ALL, *(() if clockid is None else (USE_CLOCKID,)))
    file = PerfFile(PerfEvent(flags=flags, clockid=clockid or 0))
    (tmp_path / "recorded").write_bytes(file.file())
    samples = (f"app 7 {at + ahead}.5: 1 cpu-clock: \n\t{BASE + 8:x} {{}}\n" for at in (5, 13))
    (tmp_path / "text").write_text("\n".join(samples).format(f"{B}+0x8 ({B})", "[unknown] ()"))
    perf_that(tmp_path, "cat text")
    ended = run(tmp_path, stdin=file.pipe()) if is_piped else run(tmp_path, "-i", "recorded")
    frames = [line.split()[1:] for line in ended.out.splitlines() if line.startswith("\t")]
    assert frames == [[f"{A}+0x8", "([bpf])"], [f"{B}+0x8", "([bpf])"]]


def history(path: Path) -> None:
    """A at BASE for ten seconds, then B; boot time a minute ahead, perf's clock a second behind."""
    writer = HistoryWriter(str(path), "test", 0, None)
    changes = (
        load(BASE, 64, A, SECOND),
        unload(BASE, 10 * SECOND, A),
        load(BASE, 64, B, 12 * SECOND),
    )
    for lifetime in timeline_of(*changes).lifetimes():
        writer.note(lifetime)
    writer.tick(Instant(2 * SECOND, 62 * SECOND, 1_700_000_000 * SECOND, SECOND))
    writer.close(3600 * SECOND)


def test_a_clock_that_a_history_cannot_place_is_told(tmp_path: Path) -> None:
    history(tmp_path / "ksym.db")
    events = (
        PerfEvent("raw", flags=(USE_CLOCKID,), clockid=time.CLOCK_MONOTONIC_RAW),
        PerfEvent("cycles", flags=(USE_CLOCKID,), clockid=time.CLOCK_MONOTONIC),
    )
    path = recording(tmp_path, *events)
    sample = "app 7 [000] 9.000000000: 1 {}:\n\t{:x} bpf_prog_2222222222222222_x+0x1 (bpf)\n\n"
    (tmp_path / "before.txt").write_text("".join(sample.format(n, BASE) for n in ("raw", "cycles")))
    ended = run(tmp_path, "-i", str(path))
    assert ended.err.count("perf record -k CLOCK_MONOTONIC") == 1
    raw, cycles = ended.out.split("\n\n")[:2]
    assert "bpf_prog_2222222222222222_x" in raw
    assert A in cycles


def test_no_perf_data(tmp_path: Path) -> None:
    perf_that(tmp_path, "echo no such file >&2", "exit 254")
    ended = run(tmp_path, "-i", "nowhere", status=254)
    assert ended.out == ""
    assert "no such file" in ended.err


def test_perf_s_exit_status_is_passed_on(place: Path) -> None:
    recording(place)
    perf_that(place, "head -7 before.txt", "exit 3")
    assert run(place, "-i", "recorded", status=3).out


@pytest.mark.parametrize("number, name", [(11, "SIGSEGV"), (40, "signal 40")])
def test_a_perf_that_is_killed_is_told(place: Path, number: int, name: str) -> None:
    """Real-time signals have no names."""
    recording(place)
    perf_that(place, "head -7 before.txt", f"kill -{number} $$")
    ended = run(place, "-i", "recorded", status=128 + number)
    assert ended.out
    assert f"perf was ended by {name}: " in ended.err and TALLY in ended.err


def test_without_a_perf(tmp_path: Path) -> None:
    (tmp_path / "perf").mkdir()
    (tmp_path / "recorded").write_bytes(PerfFile().file())
    done = subprocess.run(
        [sys.executable, "-B", HANDLER, "-i", "recorded"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"ksym: ") and b"perf cannot be run" in done.stderr
