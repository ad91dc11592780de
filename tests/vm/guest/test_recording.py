"""``ksym record`` on its kprobe source, end to end, in kernels that have kprobes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.oracle import perfctl, procs, programs, rawbpf, scenario, truth
from tests.vm.guest.around import CLI, HANDLER, SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: So many programs, ms for each, and samples a second, of which an emulated timer brings a few
#: hundred at the utmost.
SMALL = ("--count", "20", "--ms", "100", "--also=-F 999")
#: What is recorded by one recorder: compiling its probe takes longer than any of them.
SCENARIOS = {
    **{clock: ("--clock", clock) for clock in perfctl.CLOCKS},
    "all": ("--perf", "all", "--count", "10", "--ms", "200"),
}
ENOUGH = 0.995
#: Where the hardware's clock is emulated, perf's own can go wrong by more than the history
#: bridges: then times are windows, and some names are marked.
ENOUGH_MARKED = 0.9
#: Opens a program by its id (BPF_PROG_GET_FD_BY_ID) and runs it for a second.
BURN = """
import struct, sys
from tests.oracle import rawbpf, runner
attr = bytearray(144)
struct.pack_into("=I", attr, 0, int(sys.argv[1]))
runner.burn(rawbpf._bpf(13, attr), 1_000_000_000)
"""
#: An idle machine has nothing to show, and a busy one compiles nothing.
BUSY = "import os, time\nwhile True: os.urandom(1 << 18), time.sleep(0.05)"


def record(history: str, source: str, *commands: list[str]) -> str:
    """Run them in turn under ``ksym record``; what that said."""
    words = [*CLI, "record", "--source", source, "-o", history, "--"]
    in_turn = " && ".join(shlex.join(command) for command in commands)
    return procs.run([*words, "sh", "-c", in_turn], SECONDS).err


def plain(data: str) -> str:
    return procs.run(["perf", "script", "--ns", "-i", data], SECONDS).out


def handled(data: str, history: str) -> str:
    script = ["perf", "script", "-i", data, "-s", HANDLER, "--", "-H", history]
    return procs.run(script, SECONDS).out


class Recorded:
    """The scenarios, and a program that was there before them and still is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.history, self.there = str(folder / "x.db"), str(folder / "there.data")
        self.fd = programs.plain("still_there", 77, work=1500)
        perf = ["perf", "record", "-q", "-e", "cpu-clock:I", "-F", "499", "-g", "-a"]
        burn = [sys.executable, "-c", BURN, str(rawbpf.info(self.fd).id)]
        commands = [[*perf, "-o", self.there, "--", *burn]]
        for name, options in SCENARIOS.items():
            (folder / name).mkdir()
            commands.append(scenario.command(str(folder / name), *SMALL, *options))
        self.said = record(self.history, "kprobe", *commands)

    def scenario(self, name: str) -> scenario.Result:
        return scenario.Result(str(self._folder / name))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path_factory.mktemp("recorded"))
    yield recorded
    rawbpf.close(recorded.fd)


def assert_all_right(score: truth.Score) -> None:
    assert score.total > 100, score
    assert score.wrong == 0, score
    assert score.share_right >= ENOUGH, score


@pytest.mark.parametrize("clock", list(perfctl.CLOCKS))
def test_two_processes_through_the_kprobe(recorded: Recorded, clock: str) -> None:
    found = recorded.scenario(clock)
    before = truth.leaves(plain(found.data), found.truth)
    after = truth.leaves(handled(found.data, recorded.history), found.truth)
    print(f"perf -p, {clock}: alone {before}; with the history {after}")
    assert before.right < before.total / 2, before
    if clock == "perf":
        assert after.total > 100, after
        assert after.wrong == after.doubted, after
        assert after.share_right >= ENOUGH_MARKED, after
    else:
        assert_all_right(after)
    assert " 0 losses" in recorded.said


def test_perf_of_all_tasks_on_programs_that_are_gone(recorded: Recorded) -> None:
    """perf knows of their loads, and yet names none of them where it reads kcore."""
    found = recorded.scenario("all")
    # All samples: what perf alone says of a program depends on which it has seen before.
    text = handled(found.data, recorded.history)
    before = truth.leaves(plain(found.data), found.truth)
    after = truth.leaves(text, found.truth)
    print(f"perf -a, gone: alone {before}; with the history {after}")
    assert_all_right(after)
    assert before.share_right < after.share_right
    assert "\0" not in text


def test_perf_of_all_tasks_on_a_program_that_is_there(recorded: Recorded) -> None:
    """It is named from kcore's map, in part, with a NUL and what lies behind it."""
    info = rawbpf.info(recorded.fd)
    (start,), (length,), name = info.starts, info.lens, rawbpf.kallsyms_bpf()[info.starts[0]]

    def leaves(text: str) -> list[str]:
        """The names of the leaves in the program."""
        return [
            sample.frames[0].name
            for sample in truth.samples(text)
            if sample.frames and start <= sample.frames[0].ip < start + length
        ]

    text = handled(recorded.there, recorded.history)
    alone, ours = leaves(plain(recorded.there)), leaves(text)
    print(f"perf -a, still loaded: alone {alone.count(name)} of {len(alone)} named right")
    assert len(ours) == len(alone) > 50
    assert set(ours) == {name}
    assert "\0" not in text


def test_subprograms_through_fentry(tmp_path: Path) -> None:
    options = (*SMALL, "--mode", "subprograms")
    history = str(tmp_path / "x.db")
    record(history, "fentry", scenario.command(str(tmp_path), *options))
    found = scenario.Result(str(tmp_path))
    assert_all_right(truth.leaves(handled(found.data, history), found.truth))


@pytest.mark.slow
@pytest.mark.only_on("6.1")
def test_others_tools_work_beside_us(tmp_path: Path) -> None:
    """bcc's own tools and perf attach, see what they are for, and end as without us."""
    history = str(tmp_path / "x.db")
    recorder = procs.start(
        [*CLI, "record", "--source", "kprobe", "-o", history], err=subprocess.PIPE
    )
    try:
        assert recorder.stderr is not None
        assert b"recording with kprobe" in procs.read_line(recorder.stderr.fileno(), SECONDS)
        busy = procs.start([sys.executable, "-c", BUSY])
        try:
            profile = procs.run(["profile-bpfcc", "-F", "49", "-f", "3"], SECONDS).out
            data = str(tmp_path / "beside.data")
            perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "199", "-g", "-o", data]
            procs.run([*perf, "-p", str(busy.pid), "--", "sleep", "2"], SECONDS)
        finally:
            procs.end(busy)
        assert re.search(r" \d+$", profile, re.MULTILINE), profile
        assert plain(data).count("cpu-clock") > 5
    finally:
        recorder.terminate()
        _, said = recorder.communicate(timeout=SECONDS)
    assert recorder.returncode == 0, said
    # The tools' own programs came and went while we listened.
    listed = procs.run([*CLI, "show", "-H", history, "--all", "--json"], SECONDS).out
    assert "do_perf_event" in listed
