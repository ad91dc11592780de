"""``ksym report`` on a perf.data recorded on the spot, against a count by addresses.

Five programs, one with subprograms, run for known times in one process. perf's text is
counted by where the kernel says the programs are, without any name.
"""

from __future__ import annotations

import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from ksym_plugin.cli.report import by_text
from ksym_plugin.history.locate import Choice
from ksym_plugin.perf import report
from ksym_plugin.perf.script import Input, Request
from tests.oracle import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
#: Loads five programs and runs each for a time of its own; says where they are, in JSON.
CHILD = """
import json, sys, time
from tests.oracle import programs, rawbpf
from tests.oracle.runner import burn, set_comm
fds = [programs.plain(f"account_{number}", number + 1) for number in range(4)]
fds.append(programs.with_subprograms("account_4", ["account_main", "account_sub"], 9))
known = {}
for turn in range(10):
    for number, fd in enumerate(fds):
        set_comm(f"w{number}")
        burn(fd, (number + 1) * 8_000_000)
for number, fd in enumerate(fds):
    info = rawbpf.info(fd)
    known[info.id] = [number, [[s, s + n] for s, n in zip(info.starts, info.lens)]]
print(json.dumps(known))
"""
#: Loads, runs and closes programs, one after the other.
CHURN = """
import os, time
from tests.oracle import programs
from tests.oracle.runner import burn
for number in range(20):
    fd = programs.plain(f"churn_{number}", number % 5 + 1)
    burn(fd, 40_000_000)
    os.close(fd)
"""
#: Three programs with a subprogram alike, which they spend nearly all their time in.
SHARING = """
import json
from tests.oracle import programs, rawbpf
from tests.oracle.runner import burn
known = {}
for name in ("acl_check", "rate_limit", "lb_pick"):
    fd = programs.with_subprograms(name, [name, "mix_hash"], 3, main_work=4)
    burn(fd, 150_000_000)
    known[rawbpf.info(fd).id] = name
print(json.dumps(known))
"""
#: Runs C code beside a program whose address it finds at the end of its callchain.
MADE_UP = """
import ctypes, json, sys
from tests.oracle import programs, rawbpf
fd = programs.plain("made_up", 5)
info = rawbpf.info(fd)
ctypes.CDLL(sys.argv[1]).run(ctypes.c_ulong(info.starts[0] + 64), ctypes.c_ulong(400_000_000))
print(json.dumps([info.id, info.starts[0] + 64]))
"""
#: Its frame pointer leads to a frame that nobody made, and that returns to ``address``.
MADE_UP_FRAME = """
static unsigned long frame[2];
void run(unsigned long address, unsigned long turns) {
    frame[1] = address;
    __asm__ volatile("push %%rbp; mov %1, %%rbp; 1: dec %0; jnz 1b; pop %%rbp"
                     : "+r"(turns) : "r"(frame) : "memory", "cc");
}
"""
#: For how long each ran, of all five.
TIMES = {number: (number + 1) / 15 for number in range(5)}

pytestmark = pytest.mark.usefixtures("perf")


class Recorded:
    """A perf.data with its history, and what is known of its programs, by their ids."""

    def __init__(self, folder: Path) -> None:
        self.data, history = str(folder / "perf.data"), str(folder / "ksym.db")
        perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-g", "-o", self.data]
        line = [*KSYM, "record", "-o", history, "--", *perf, "--", sys.executable, "-c", CHILD]
        known = json.loads(procs.run(line, 60).out.splitlines()[-1])
        self.numbers = {int(prog_id): number for prog_id, (number, _) in known.items()}
        self.ranges = {int(prog_id): ranges for prog_id, (_, ranges) in known.items()}

    def holder(self, address: int) -> int | None:
        for prog_id, ranges in self.ranges.items():
            if any(start <= address < end for start, end in ranges):
                return prog_id
        return None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("account"))


@pytest.fixture(scope="module")
def counted(recorded: Recorded) -> dict[str, Any]:
    """Samples by program id from perf's own text, and those whose leaf is in the kernel."""
    text = procs.run(["perf", "script", "-i", recorded.data, "-F", "comm,ip"], 60).out
    own: Counter[int | None] = Counter()
    total: Counter[int | None] = Counter()
    samples = kernel = bare = 0
    for block in text.strip().split("\n\n"):
        addresses = [int(line, 16) for line in block.splitlines()[1:]]
        samples += 1
        if not addresses:  # Its leaf is known, but not printed.
            bare += 1
            continue
        kernel += addresses[0] >= 1 << 63
        holders = [recorded.holder(address) for address in addresses]
        own[holders[0]] += 1
        total.update(set(holders))
    assert bare < samples / 100
    return {"samples": samples, "kernel": kernel, "bare": bare, "own": own, "total": total}


@pytest.fixture(scope="module")
def reported(recorded: Recorded) -> dict[str, Any]:
    return json.loads(procs.run([*KSYM, "report", "-i", recorded.data, "--json"], 60).out)


def test_samples_are_those_of_perf_s_text(
    recorded: Recorded, counted: dict[str, Any], reported: dict[str, Any]
) -> None:
    rows = {row["program"]: row for row in reported["programs"]}
    assert set(recorded.numbers) <= set(rows)
    for prog_id in recorded.numbers:
        for count in ("own", "total"):
            found = rows[prog_id][count]
            assert 0 <= found["samples"] - counted[count][prog_id] <= counted["bare"]
            whole = found["samples"] / reported["kernel_samples"]
            assert found["of_kernel"]["share"] == pytest.approx(whole)
    assert reported["samples"] == counted["samples"]
    assert 0 <= reported["kernel_samples"] - counted["kernel"] <= counted["bare"]


def test_shares_are_those_of_the_times_they_ran(
    recorded: Recorded, reported: dict[str, Any]
) -> None:
    rows = [row for row in reported["programs"] if row["program"] in recorded.numbers]
    whole = sum(row["own"]["samples"] for row in rows)
    assert whole > 1000
    for row in rows:
        expected = TIMES[recorded.numbers[row["program"]]]
        # Three standard deviations, and what calling them and other work takes.
        error = 3 * (expected * (1 - expected) / whole) ** 0.5 + 0.03
        assert row["own"]["samples"] / whole == pytest.approx(expected, abs=error)


_WAYS = {
    "system-wide": ["-a", "-g", "-e", "cpu-clock,page-faults"],
    "leaves": [],
    "leaves, system-wide": ["-a"],
    "another clock": ["-k", "CLOCK_MONOTONIC", "-g"],
    "tracepoints": ["-a", "-e", "cpu-clock,sched:sched_switch"],
    "callchains of tracepoints": ["-g", "-e", "sched:sched_switch,cpu-clock"],
    "the user's part unwound": ["--call-graph", "dwarf,4096"],
}


@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_read_directly_and_by_perf_s_text_it_is_the_same(tmp_path: Path, way: list[str]) -> None:
    """But for samples of which perf prints nothing: their callchain has a word like a marker."""
    data, history = str(tmp_path / "perf.data"), str(tmp_path / "ksym.db")
    event = [] if "-e" in way else ["-e", "cpu-clock"]
    perf = ["perf", "record", "-q", "-F", "2000", *event, *way, "-o", data]
    line = [*KSYM, "record", "-o", history, "--", *perf, "--", sys.executable, "-c", CHURN]
    procs.run(line, 60)
    ours = report.read(data, Choice(history), None)
    assert sum(document["bpf_samples"] for document in ours) > 100
    theirs, status = by_text(Input(data), Choice(history), None, Request(()))
    assert status == 0
    if ours != theirs:
        text = procs.run(["perf", "script", "-i", data, "-F", "comm,ip"], 60).out
        bare = sum("\n" not in block for block in text.strip().split("\n\n"))
        missing = [a["kernel_samples"] - b["kernel_samples"] for a, b in zip(ours, theirs)]
        assert 0 < sum(missing) <= bare


@pytest.mark.parametrize("way", [[], ["-g"]], ids=["leaves", "callchains"])
def test_programs_that_share_a_subprogram_have_their_own_names(
    tmp_path: Path, way: list[str]
) -> None:
    data, history = str(tmp_path / "perf.data"), str(tmp_path / "ksym.db")
    perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "999", *way, "-o", data]
    line = [*KSYM, "record", "-o", history, "--", *perf, "--", sys.executable, "-c", SHARING]
    known = json.loads(procs.run(line, 60).out.splitlines()[-1])
    found = json.loads(procs.run([*KSYM, "report", "-i", data, "--json"], 60).out)
    rows = {str(row["program"]): row for row in found["programs"]}
    for number, name in known.items():
        assert rows[number]["name"].endswith(f"_{name}")
        most, *_ = rows[number]["functions"]
        assert most.endswith("_mix_hash")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the C code is for x86-64")
@pytest.mark.usefixtures("compiler")
def test_a_program_s_address_in_a_user_s_stack_is_not_the_program(tmp_path: Path) -> None:
    data, history = str(tmp_path / "perf.data"), str(tmp_path / "ksym.db")
    (tmp_path / "frame.c").write_text(MADE_UP_FRAME)
    library = str(tmp_path / "frame.so")
    procs.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, str(tmp_path / "frame.c")], 60)
    perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "2000", "-g", "-o", data]
    child = [sys.executable, "-c", MADE_UP, library]
    line = [*KSYM, "record", "-o", history, "--", *perf, "--", *child]
    prog_id, address = json.loads(procs.run(line, 60).out.splitlines()[-1])
    text = procs.run(["perf", "script", "-i", data, "-F", "ip"], 60).out
    assert text.count(f"{address:x}") > 50
    directly = report.read(data, Choice(history), None)
    of_text, _ = by_text(Input(data), Choice(history), None, Request(()))
    for (document,) in (directly, of_text):
        assert document["samples"] > 50
        assert prog_id not in [row["program"] for row in document["programs"]]


def test_what_only_perf_reads_is_counted_of_its_text(tmp_path: Path) -> None:
    data, history = str(tmp_path / "perf.data"), str(tmp_path / "ksym.db")
    perf = ["perf", "record", "-q", "-z", "-e", "cpu-clock", "-F", "2000", "-g", "-o", data]
    line = [*KSYM, "record", "-o", history, "--", *perf, "--", sys.executable, "-c", CHURN]
    procs.run(line, 60)
    found = json.loads(procs.run([*KSYM, "report", "-i", data, "--json"], 60).out)
    names = [row["name"] for row in found["programs"] if "_churn_" in row["name"]]
    assert len(names) == 20
    assert found["bpf_samples"] > 100


def test_who_ran_them(recorded: Recorded, reported: dict[str, Any]) -> None:
    for row in reported["programs"]:
        if row["program"] in recorded.numbers:
            comm, samples = next(iter(row["tasks"].items()))
            assert comm == f"w{recorded.numbers[row['program']]}"
            assert samples >= 0.98 * row["total"]["samples"]
            assert row["lived"][1] is None or row["lived"][1] > 1_000_000_000


def test_a_program_with_subprograms_is_one_row(
    recorded: Recorded, reported: dict[str, Any]
) -> None:
    (row,) = [row for row in reported["programs"] if recorded.numbers.get(row["program"]) == 4]
    assert row["name"].endswith("_account_main")
    assert any(function.endswith("_account_sub") for function in row["functions"])


def test_the_table(recorded: Recorded, reported: dict[str, Any]) -> None:
    done = procs.run([*KSYM, "report", "-i", recorded.data, "--filter", "account_"], 60)
    lines = done.out.splitlines()
    assert len(lines) == 8
    ids = [int(line.split()[0]) for line in lines[3:]]
    assert ids == [
        row["program"] for row in reported["programs"] if row["program"] in recorded.numbers
    ]


@pytest.mark.parametrize("form", ["svg", "speedscope"])
def test_pictures_hold_every_sample(recorded: Recorded, counted: dict[str, Any], form: str) -> None:
    out = procs.run([*KSYM, "script", "-i", recorded.data, "--format", form], 60).out
    if form == "speedscope":
        merged, *threads = json.loads(out)["profiles"]
        assert sum(merged["weights"]) == counted["samples"]
        assert sum(profile["endValue"] for profile in threads) == counted["samples"]
        return
    root = ET.fromstring(out)
    data = json.loads(root.find("{http://www.w3.org/2000/svg}metadata").text)
    assert data["boxes"][2] == counted["samples"]
    told = {re.match(r"program (\d+)", lines[0])[1] for lines in data["notes"].values()}
    assert set(map(str, recorded.numbers)) <= told
