"""``ksym record`` on its kprobe source, end to end, in kernels that have kprobes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle import perfctl, procs, programs, rawbpf, scenario, truth

HANDLER = f"{procs.REPO}/contrib/perf-script/ksym_handler.py"
CLI = [sys.executable, "-m", "ksym_plugin.cli"]
#: The emulation is slow: a compilation alone takes ten seconds.
SECONDS = 240.0
#: So many programs, and ms for each: a second of samples, which is a minute's work to read.
SMALL = ("--count", "20", "--ms", "50")
ENOUGH = 0.995
#: Opens a program by its id (BPF_PROG_GET_FD_BY_ID) and runs it for a second.
BURN = """
import struct, sys
from tests.oracle import rawbpf, runner
attr = bytearray(144)
struct.pack_into("=I", attr, 0, int(sys.argv[1]))
runner.burn(rawbpf._bpf(13, attr), 1_000_000_000)
"""


class Recorded:
    """One scenario under ``ksym record --source``, and what is made of its samples."""

    def __init__(self, directory: Path, source: str, *options: str) -> None:
        self.history = str(directory / "x.db")
        around = [*CLI, "record", "--source", source, "-o", self.history, "--"]
        self.said = procs.run(
            [*around, *scenario.command(str(directory), *SMALL, *options)], SECONDS
        ).err
        found = scenario.Result(str(directory))
        self.data, self.truth = found.data, found.truth
        words = ["perf", "script", "-i", self.data]
        self.plain = procs.run([*words, "--ns"], SECONDS).out
        self.handled = procs.run([*words, "-s", HANDLER, "--", "-H", self.history], SECONDS).out

    def scores(self) -> tuple[truth.Score, truth.Score]:
        return truth.leaves(self.plain, self.truth), truth.leaves(self.handled, self.truth)


def assert_all_right(score: truth.Score) -> None:
    assert score.total > 200, score
    assert score.wrong == 0, score
    assert score.share_right >= ENOUGH, score


@pytest.mark.parametrize("clock", sorted(perfctl.CLOCKS))
def test_two_processes_through_the_kprobe(tmp_path: Path, clock: str) -> None:
    recorded = Recorded(tmp_path, "kprobe", "--clock", clock)
    before, after = recorded.scores()
    print(f"perf -p, {clock}: alone {before}; with the history {after}")
    assert before.right < before.total / 2, before
    assert_all_right(after)
    assert " 0 losses" in recorded.said


def test_subprograms_through_fentry(tmp_path: Path) -> None:
    options = ("--mode", "subprograms", "--count", "10")
    assert_all_right(Recorded(tmp_path, "fentry", *options).scores()[1])


def test_perf_of_all_tasks_on_programs_that_are_gone(tmp_path: Path) -> None:
    """perf knows of their loads, and yet names none of them where it reads kcore."""
    recorded = Recorded(tmp_path, "kprobe", "--perf", "all", "--count", "8")
    before, after = recorded.scores()
    print(f"perf -a, gone: alone {before}; with the history {after}")
    assert_all_right(after)
    assert before.share_right < after.share_right
    assert "\0" not in recorded.handled


def test_perf_of_all_tasks_on_a_program_that_is_there(tmp_path: Path) -> None:
    """It is named from kcore's map, in part, with a NUL and what lies behind it."""
    history, data = str(tmp_path / "x.db"), str(tmp_path / "perf.data")
    fd = programs.plain("still_there", 77, work=1500)
    info = rawbpf.info(fd)
    (start,), (length,), name = info.starts, info.lens, rawbpf.kallsyms_bpf()[info.starts[0]]
    run = [sys.executable, "-c", BURN, str(info.id)]
    words = [*CLI, "record", "--source", "kprobe", "-o", history, "--"]
    perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "499", "-g", "-a", "-o", data, "--"]
    procs.run([*words, *perf, *run], SECONDS)
    script = ["perf", "script", "-i", data]
    plain = procs.run(script, SECONDS).out
    handled = procs.run([*script, "-s", HANDLER, "--", "-H", history], SECONDS).out

    def leaves(text: str) -> list[str]:
        """The names of the leaves in the program."""
        return [
            sample.frames[0].name
            for sample in truth.samples(text)
            if sample.frames and start <= sample.frames[0].ip < start + length
        ]

    alone, ours = leaves(plain), leaves(handled)
    print(f"perf -a, still loaded: alone {alone.count(name)} of {len(alone)} named right")
    assert len(ours) == len(alone) > 100
    assert set(ours) == {name}
    assert "\0" not in handled
    os.close(fd)


@pytest.mark.slow
def test_others_tools_work_beside_us(tmp_path: Path) -> None:
    """bcc's own tools attach, see what they are for, and end as without us."""
    history = str(tmp_path / "x.db")
    recorder = procs.start(
        [*CLI, "record", "--source", "kprobe", "-o", history], err=subprocess.PIPE
    )
    try:
        assert recorder.stderr is not None
        assert b"recording with kprobe" in procs.read_line(recorder.stderr.fileno(), SECONDS)
        # An idle machine has nothing to show.
        busy = procs.start([sys.executable, "-c", "while True: sum(range(1000))"])
        try:
            profile = procs.run(["profile-bpfcc", "-F", "49", "-f", "3"], SECONDS).out
        finally:
            procs.end(busy)
        assert re.search(r" \d+$", profile, re.MULTILINE), profile
        data = str(tmp_path / "perf.data")
        words = ["perf", "record", "-q", "-a", "-g", "-e", "cpu-clock", "-o", data, "sleep", "1"]
        procs.run(words, SECONDS)
        assert "cpu-clock" in procs.run(["perf", "script", "-i", data], SECONDS).out
    finally:
        recorder.terminate()
        _, said = recorder.communicate(timeout=SECONDS)
    assert recorder.returncode == 0, said
    # The tools' own programs came and went while we listened.
    listed = procs.run([*CLI, "show", "-H", history, "--all", "--json"], SECONDS).out
    assert "do_perf_event" in listed
