"""Lines of a recording's own samples, against bpf(2)'s table read with other code.

A program of five functions runs under ``perf record`` and is gone when it is looked at.
Where its samples were is taken from perf's bare addresses, what is there from the kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from ksym_plugin.kernel import identity
from tests.live import conftest
from tests.oracle import compiled, procs

KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
#: argv: the object, and how much CPU time it gets. Says what each byte of it is, in JSON.
CHILD = """
import json, os, sys, time
from tests.live.test_lines import Truth
from tests.oracle import compiled, rawbpf
with compiled.loaded(sys.argv[1]) as prog_id:
    places = Truth(prog_id).places()
    fd = rawbpf.open_id(prog_id)
    until = time.thread_time() + float(sys.argv[2])
    while time.thread_time() < until:
        rawbpf.test_run(fd, 5000)
    os.close(fd)
print(json.dumps([prog_id, list(places.items())]))
"""
#: A line of the kernel that is made up is so many bytes; it runs so much above where it is linked.
STRIDE, KASLR = 0x10000, 4 << 20

pytestmark = [pytest.mark.usefixtures("perf", "perf_python"), pytest.mark.slow]


class Recorded:
    """A perf.data with its history, its samples' addresses, and what was at them."""

    def __init__(self, folder: Path) -> None:
        self.data = str(folder / "perf.data")
        made = compiled.compile_five(str(folder))
        perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-g", "-o", self.data]
        work = [sys.executable, "-c", CHILD, made, "2"]
        history = str(folder / "ksym.db")
        done = procs.run([*KSYM, "record", "-o", history, "--", *perf, "--", *work], 90)
        self.prog_id, places = json.loads(done.out.splitlines()[-1])
        self.places = {address: tuple(place) for address, place in places}
        text = procs.run(["perf", "script", "-i", self.data, "-F", "comm,ip"], 60).out
        blocks = text.strip().split("\n\n")
        self.samples = [[int(line, 16) for line in one.splitlines()[1:]] for one in blocks]

    def source(self, chain: list[int], depth: int) -> tuple[str, str, int, str] | None:
        """Function, file, line and text of a frame; of a caller, those of its call.

        An interrupted function is no caller, but looks like one; at its first byte it shows.
        """
        here, before = self.places.get(chain[depth]), self.places.get(chain[depth] - 1)
        if depth == 0 or (here and before and here[0] != before[0]):
            return here
        return before or here

    def script(self, *words: str) -> str:
        return procs.run([*KSYM, "script", "-i", self.data, *words], 120).out

    def by_function(self) -> dict[str, Counter[tuple[str, int]]]:
        """Of each function, in how many samples it was at which file and line."""
        found: dict[str, Counter[tuple[str, int]]] = {}
        for chain in self.samples:
            sources = {self.source(chain, depth) for depth in range(len(chain))}
            for name, file, line, _ in sources - {None}:
                found.setdefault(name, Counter())[file, line] += 1
        return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    for tool in ("clang", "bpftool", "unshare"):
        if shutil.which(tool) is None:
            conftest._stop(conftest.LACK, f"{tool} is not installed")
    return Recorded(tmp_path_factory.mktemp("lined"))


def printed(text: str) -> list[list[tuple[int, str, str]]]:
    """Of each sample with frames: address, symbol and what stands below."""
    samples = []
    for block in text.strip().split("\n\n"):
        frames: list[tuple[int, str, str]] = []
        for line in block.splitlines()[1:]:
            if line.startswith("\t"):
                address, symbol = line.split()[:2]
                frames.append((int(address, 16), symbol, ""))
            else:
                frames[-1] = (*frames[-1][:2], line[2:])
        samples.append(frames)
    return samples


def test_text_has_the_line_of_every_sample(recorded: Recorded) -> None:
    samples = printed(recorded.script("--lines"))
    assert len(samples) == len(recorded.samples)
    compared = Counter()
    for frames, chain in zip(samples, recorded.samples):
        for depth, (_, symbol, below) in enumerate(frames):
            source = recorded.source(chain, depth)
            if source is None:
                assert below == "", symbol
                continue
            name, file, line, _ = source
            assert symbol.startswith(name + "+")
            assert below == f"{os.path.basename(file)}:{line}"
            compared[depth > 0] += 1
    assert compared[True] > 500 and compared[False] > 500


def test_the_account_has_the_lines(recorded: Recorded) -> None:
    done = procs.run([*KSYM, "report", "-i", recorded.data, "--json"], 60)
    (row,) = [row for row in json.loads(done.out)["programs"] if row["program"] == recorded.prog_id]
    expected: Counter[tuple[str, int, str]] = Counter()
    own: Counter[tuple[str, int, str]] = Counter()
    for chain in recorded.samples:
        sources = [recorded.source(chain, depth) for depth in range(len(chain))]
        inside = [depth for depth, source in enumerate(sources) if source is not None]
        if inside:
            source = sources[inside[0]][1:]
            expected[source] += 1
            own[source] += inside[0] == 0
    bare = sum(not chain for chain in recorded.samples)
    assert sum(expected.values()) > 500
    # The kernel can have a sample's leaf without its chain.
    assert sum(line["samples"] for line in row["lines"]) - sum(expected.values()) in range(bare + 1)
    for line in row["lines"]:
        source = (line["file"], line["line"], line["text"].strip())
        assert 0 <= line["samples"] - expected[source] <= bare
        assert 0 <= line["own"] - own[source] <= bare
    table = procs.run([*KSYM, "report", "-i", recorded.data, "--lines"], 60).out
    hottest = row["lines"][0]
    place = f"{os.path.basename(hottest['file'])}:{hottest['line']}"
    assert re.search(rf" {hottest['own']:,} .* {hottest['samples']:,} .* {place}  ", table)


def test_pictures_have_the_hottest_lines(recorded: Recorded) -> None:
    document = json.loads(recorded.script("--format", "speedscope"))
    root = ET.fromstring(recorded.script("--format", "svg"))
    data = json.loads(root.find("{http://www.w3.org/2000/svg}metadata").text)  # type: ignore[union-attr,arg-type]
    notes = {data["names"][int(at)]: lines for at, lines in data["notes"].items()}
    frames = {frame["name"]: frame for frame in document["shared"]["frames"]}
    counted = recorded.by_function()
    assert {name.split("_", 3)[3] for name in counted} == compiled.FUNCTIONS
    for name, lines in counted.items():
        assert (frames[name]["file"], frames[name]["line"]) in close(lines)
        told = [line.split() for line in notes[name] if ".c:" in line]
        assert len(told) == min(len(lines), 5)
        assert told[0][0] in {f"{os.path.basename(file)}:{line}" for file, line in close(lines)}
        share = 100 * max(lines.values()) / sum(lines.values())
        assert abs(int(told[0][1]) - share) <= 2


def close(lines: Counter[tuple[str, int]]) -> set[tuple[str, int]]:
    """The hottest lines, and those that samples without a chain could make so."""
    most = max(lines.values())
    return {place for place, samples in lines.items() if samples >= most - 2}


# The kernel's lines


@pytest.fixture(scope="module")
def vmlinux(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, int]:
    """A file that says it is the running kernel's: its path, and from where to where it is.

    One function from beginning to end, STRIDE bytes a line.
    """
    folder = tmp_path_factory.mktemp("vmlinux")
    for tool in ("clang", "addr2line"):
        if shutil.which(tool) is None:
            conftest._stop(conftest.LACK, f"{tool} is not installed")
    marks = {}
    with open("/proc/kallsyms", encoding="ascii") as file:
        for line in file:
            address, _, name = line.split()[:3]
            if name in ("_text", "_etext"):
                marks[name] = int(address, 16)
    build_id = identity.build_id()
    if len(marks) < 2 or not marks["_text"] or build_id is None:
        conftest._stop(conftest.LACK, "this kernel does not tell its extent and build id")
    start, end = marks["_text"], marks["_etext"]
    body = f'__asm__ volatile(".skip {STRIDE}");\n' * ((end - start) // STRIDE + 1)
    (folder / "made_up.c").write_text(f"__attribute__((naked)) void _text(void) {{\n{body}}}\n")
    flags = ["-g", "-O0", "-ffreestanding", "-fno-pic", "-mcmodel=kernel", "-nostdlib", "-static"]
    link = [f"-Wl,-Ttext={start - KASLR:#x},-e,_text,--build-id=0x{build_id}"]
    subprocess.run(
        ["clang", *flags, *link, "made_up.c", "-o", "vmlinux"],
        cwd=folder,
        check=True,
        timeout=120 * procs.PATIENCE,
    )
    return str(folder / "vmlinux"), start, end


def test_the_kernel_s_lines_reach_perf_s_python(
    recorded: Recorded, vmlinux: tuple[str, int, int]
) -> None:
    path, start, end = vmlinux
    compared = Counter()
    told: dict[int, str] = {}
    for frames in printed(recorded.script("--lines", "--vmlinux", path)):
        for depth, (address, symbol, below) in enumerate(frames):
            if not start <= address < end:
                assert "made_up" not in below
                continue
            back = depth > 0 and not symbol.endswith("+0x0")
            assert told.setdefault(address - back, below) == below
            compared[depth > 0] += 1
    assert compared[True] > 500 and compared[False] > 20
    words = ["addr2line", "-s", "-e", path, *(hex(address - KASLR) for address in told)]
    assert procs.run(words, 60).out.split() == list(told.values())


def test_names_are_perf_s_own_also_with_a_vmlinux(
    recorded: Recorded, vmlinux: tuple[str, int, int]
) -> None:
    assert recorded.script("--vmlinux", vmlinux[0]) == recorded.script()
