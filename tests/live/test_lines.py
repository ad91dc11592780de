"""Source lines of BPF programs: against bpf(2) read by other code, before and after the unload."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.live import conftest
from tests.oracle import compiled, procs, rawbpf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
SECONDS = 120
#: What one program costs its reader, in ms of CPU, with room for a loaded machine.
MOST_CPU_MS = 1.0

#: argv: how many programs, how long each lives and how long until the next, in ms.
TURNS = """
import os, sys, time
from tests.oracle import programs
count, life, pause = (float(word) for word in sys.argv[1:])
for number in range(int(count)):
    fd = programs.with_lines("turn", "oracle_lined_function", number % 7)
    time.sleep(life / 1000)
    os.close(fd)
    time.sleep(pause / 1000)
"""


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> str:
    for tool in ("clang", "bpftool", "unshare"):
        if shutil.which(tool) is None:
            conftest._stop(conftest.LACK, f"{tool} is not installed")
    return compiled.compile_five(str(tmp_path_factory.mktemp("five")))


class Truth:
    """Every byte of a program: its function and its line, by bpf(2) read with other code."""

    def __init__(self, prog_id: int) -> None:
        fd = rawbpf.open_id(prog_id)
        try:
            self.info = rawbpf.info(fd)
            self.rows = rawbpf.line_rows(fd)
        finally:
            os.close(fd)
        self.names = rawbpf.kallsyms_bpf()

    def places(self) -> dict[int, tuple[str, str, int, str]]:
        """Address to name, file, line and text."""
        found = {}
        for start, length in zip(self.info.starts, self.info.lens):
            own = [row for row in self.rows if start <= row.address < start + length and row.line]
            addresses = [row.address for row in own]
            for address in range(start, start + length):
                row = own[bisect.bisect_right(addresses, address) - 1]
                found[address] = (self.names[start], row.file, row.line, row.text)
        return found


@contextlib.contextmanager
def recorder(history: str) -> Iterator[None]:
    """``ksym record`` at work, its words on stderr in history + '.err'."""
    with open(history + ".err", "wb") as err:
        child = procs.start([*KSYM, "record", "--stats", "-o", history], err=err.fileno())
    try:
        deadline = time.monotonic() + SECONDS
        while b"recording with" not in Path(history + ".err").read_bytes():
            assert time.monotonic() < deadline, Path(history + ".err").read_text()
            time.sleep(0.05)
        yield
        child.send_signal(signal.SIGINT)
        assert child.wait(SECONDS) == 0
    finally:
        procs.end_group(child)


def wait_until_gone(prog_id: int) -> None:
    """The kernel tells of an unload before it gives up the id."""
    deadline = time.monotonic() + SECONDS
    with contextlib.suppress(FileNotFoundError):
        while True:
            os.close(rawbpf.open_id(prog_id))
            assert time.monotonic() < deadline
            time.sleep(0.01)


def wait_until(is_so: Callable[[], bool]) -> None:
    """The recorder writes what it has seen a little later."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def resolved(words: list[str], addresses: list[int]) -> list[dict[str, Any]]:
    command = [*KSYM, "resolve", "--json", *words, "-"]
    text = "\n".join(map(hex, addresses))
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        env=procs.environment(),
        cwd=procs.REPO,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def told(words: list[str], addresses: list[int]) -> dict[int, tuple[str, str, int, str]]:
    return {
        int(entry["address"], 16): (entry["name"], entry["file"], entry["line"], entry["text"])
        for entry in resolved(words, addresses)
    }


def test_every_byte_of_five_functions_before_and_after_the_unload(
    five: str, tmp_path: Path
) -> None:
    history = str(tmp_path / "h.db")
    with recorder(history):
        with compiled.loaded(five) as prog_id:
            truth = Truth(prog_id)
            places = truth.places()
            loaded = time.monotonic_ns()
            live = told(["-H", history], list(places))
        wait_until_gone(prog_id)
        # Others' programs may have the place by now.
        own = {name for name, *_ in places.values()}
        wait_until(
            lambda: all(
                entry["name"] not in own or entry["certainty"] == "grace"
                for entry in resolved(["-H", history], truth.info.starts)
            )
        )
    at = ["-H", history, "--clock", "monotonic", "--at", f"{loaded / 1e9:.9f}"]
    assert {name.split("_", 3)[3] for name, *_ in places.values()} == compiled.FUNCTIONS
    assert live == places
    assert told(at, list(places)) == places


def test_without_a_history_the_kernel_is_asked(five: str, tmp_path: Path) -> None:
    with compiled.loaded(five) as prog_id:
        places = Truth(prog_id).places()
        found = told([], list(places))
    assert found == places


def test_lines_are_those_that_bpftool_prints(five: str) -> None:
    with compiled.loaded(five) as prog_id:
        words = ["bpftool", "prog", "dump", "xlated", "id", str(prog_id), "linum"]
        text = procs.run(words, SECONDS).out
        places = Truth(prog_id).places()
    printed = {
        int(line.split("line_num:")[1].split()[0]) for line in text.splitlines() if "[file:" in line
    }
    assert printed
    assert {line for _, _, line, _ in places.values()} == printed


def test_callers_are_on_the_line_of_the_call(five: str, tmp_path: Path) -> None:
    history = str(tmp_path / "h.db")
    with recorder(history), compiled.loaded(five) as prog_id:
        truth = Truth(prog_id)
        places = truth.places()
        addresses = [row.address for row in truth.rows if row.address - 1 in places]
        found = resolved(["-H", history, "--chain"], [addresses[0], *addresses])
    wanted = [places[addresses[0]][2], *(places[address - 1][2] for address in addresses)]
    starts = set(truth.info.starts)
    compared = 0
    for entry, line, address in zip(found, wanted, [addresses[0], *addresses]):
        if address not in starts:
            assert entry["line"] == line
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(("life", "goal"), [(2, 50.0), (20, 90.0)])
def test_programs_that_live_briefly_are_read_in_time(
    life: int, goal: float, tmp_path: Path
) -> None:
    history = str(tmp_path / "h.db")
    with recorder(history):
        procs.run([sys.executable, "-c", TURNS, "90", str(life), "8"], SECONDS)
    said = Path(history + ".err").read_text()
    summary = next(line for line in said.splitlines() if "source lines of" in line)
    share = float(summary.split("(")[1].split(" %")[0])
    assert share >= goal, summary
    count = int(summary.split("source lines of ")[1].split()[0])
    cpu = float(summary.split("; ")[-1].split()[0])
    # What starting an interpreter takes is in it.
    assert (cpu - 0.1) * 1000 / count <= MOST_CPU_MS, summary
