"""perf.data recorded on the spot in many ways: read directly, and by perf script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ksym_plugin.perf.data import DataError
from ksym_plugin.perf.data_samples import DataSamples
from ksym_plugin.perf.samples import FIRST_MARKER, KERNEL, MARKERS
from tests.oracle import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = tuple[object, ...]

pytestmark = [pytest.mark.usefixtures("perf"), pytest.mark.slow]

_FIELDS = ("comm", "pid", "tid", "cpu", "time", "period", "event", "ip")
_LINE = re.compile(
    r"\s*(.*?)\s+(-?\d+)/(-?\d+)\s+(?:\[(\d+)\]\s+)?(?:(\d+)\.(\d{9}):\s+)?(?:(\d+)\s+)?"
    r"(\S+):\s*([0-9a-f]*)\s*"
)
#: Starts processes and threads, which rename themselves, and touches new memory.
_LOAD = """
import os, threading
def work(name):
    with open("/proc/thread-self/comm", "w") as file:
        file.write(name)
    for _ in range(300):
        os.stat("/proc/self/status"); bytearray(1 << 16)
for turn in range(6):
    if os.fork() == 0:
        threads = [threading.Thread(target=work, args=(f"w {turn} {n}",)) for n in range(3)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        os._exit(0)
    os.wait()
"""
_WAYS = {
    "callchains": ["-g"],
    "no callchains": ["-d", "-R"],
    "system-wide": ["-a", "-g"],
    "several events": ["-g", "-e", "cpu-clock,task-clock,page-faults"],
    "a group of counters": ["-a", "-g", "-e", "{cpu-clock,page-faults}:S"],
    "another clock": ["-k", "CLOCK_MONOTONIC", "-g"],
    "no times": ["--no-timestamp", "-a", "-g"],
    "a tracepoint": ["-a", "-g", "-e", "sched:sched_switch"],
    "user only": ["-g", "-e", "cpu-clock:u"],
    "registers": ["-g", "--user-regs=ip,sp"],
    "build ids in the maps": ["--buildid-mmap", "-g"],
}


def record(path: Path, way: Sequence[str]) -> None:
    line = ["perf", "record", "-q", "-F", "3000", "-o", str(path), *way]
    if "-e" not in way:
        line += ["-e", "cpu-clock"]
    procs.run([*line, "--", sys.executable, "-c", _LOAD], 60)


def by_perf(path: Path) -> tuple[list[str], list[tuple[Row, list[int]]]]:
    """The fields that the data has, and each sample's with its addresses."""
    fields = list(_FIELDS)
    while True:
        line = ["perf", "script", "-f", "-i", str(path), "--ns", "-F", ",".join(fields)]
        done = procs.run(line, 60, status=None)
        lacking = re.search(r"do not have (\w+) attribute set", done.err)
        if lacking is None:
            break
        fields.remove(lacking[1].lower())
    found: list[tuple[Row, list[int]]] = []
    for line_ in done.out.splitlines():
        if line_.startswith("\t"):
            found[-1][1].append(int(line_.split()[0], 16))
        elif line_.strip():
            matched = _LINE.fullmatch(line_)
            assert matched is not None, line_
            comm, pid, tid, cpu, seconds, rest, period, event, ip = matched.groups()
            time = None if seconds is None else int(seconds) * 10**9 + int(rest)
            numbers = (None if text is None else int(text) for text in (cpu, period))
            found.append(
                ((comm, int(pid), int(tid), time, event, *numbers), [int(ip, 16)] if ip else [])
            )
    return fields, found


def directly(path: Path, fields: Sequence[str]) -> list[tuple[Row, list[tuple[int, str]], bool]]:
    """The same; and whether perf takes the callchain: nothing in it looks like a new marker."""
    rows = []
    known = {*MARKERS.values()}
    with DataSamples(str(path)) as samples:
        for sample in samples.samples():
            cpu = sample.cpu if "cpu" in fields else None
            period = sample.period if "period" in fields else None
            head = (sample.comm, sample.pid, sample.tid, sample.time, sample.event.name)
            words = memoryview(sample.callchain).cast("Q")
            is_whole = all(word < FIRST_MARKER or word in known for word in words)
            rows.append(((*head, cpu, period), list(sample.frames()), is_whole))
    return rows


def compare(path: Path) -> int:
    fields, theirs = by_perf(path)
    ours = directly(path, fields)
    assert [row for row, _ in theirs] == [row for row, _, _ in ours]
    for (_, addresses), (_, frames, is_whole) in zip(theirs, ours):
        if not is_whole:
            assert addresses == []
            continue
        # Of a user's frame without symbol perf 6.1 prints where it is in its file.
        assert len(addresses) == len(frames)
        for address, (mine, region) in zip(addresses, frames):
            assert address == mine or (region != KERNEL and (address ^ mine) % 4096 == 0)
    return len(ours)


@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_as_perf_reads_it(tmp_path: Path, way: list[str]) -> None:
    path = tmp_path / "perf.data"
    record(path, way)
    assert compare(path) > 20


def test_a_pipe_s_file(tmp_path: Path) -> None:
    path = tmp_path / "perf.data"
    line = ["perf", "record", "-q", "-a", "-g", "-e", "cpu-clock", "-o", "-", "--"]
    with path.open("wb") as file:
        command = [*line, sys.executable, "-c", _LOAD]
        subprocess.run(command, stdout=file, check=True, timeout=60)
    assert compare(path) > 20


@pytest.mark.parametrize("way, words", [(["-z"], "compressed"), (["--threads"], "folder")])
def test_what_is_left_to_perf(tmp_path: Path, way: list[str], words: str) -> None:
    record(tmp_path / "perf.data", [*way, "-a", "-g"])
    with pytest.raises(DataError, match=words), DataSamples(str(tmp_path / "perf.data")):
        pass


def test_stacks_that_perf_unwinds_lack_their_user_part(tmp_path: Path) -> None:
    path = tmp_path / "perf.data"
    record(path, ["--call-graph", "dwarf"])
    with DataSamples(str(path)) as samples:
        callers = [frame for sample in samples.samples() for frame in sample.frames()[1:]]
        assert {region for _, region in callers} == {KERNEL}
