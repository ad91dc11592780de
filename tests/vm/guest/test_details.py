"""Lines and names of programs, on kernels where BPF may trace: bpf(2) read by other code."""

from __future__ import annotations

import os
import select
import sys

import pytest
from bcc import BPF

from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.kernel.btf import Targets
from ksym_plugin.sources.details import DetailsProcess
from ksym_plugin.timeline.program import GONE, unpack_lines
from ksym_plugin.timeline.symbols import trampoline_key
from tests.oracle import procs, programs, rawbpf

TURNS = """
import os, sys, time
from tests.oracle import programs
count, life = (float(word) for word in sys.argv[1:])
for number in range(int(count)):
    fd = programs.with_lines("turn", "oracle_lined_function", number % 7)
    time.sleep(life / 1000)
    os.close(fd)
    time.sleep(0.01)
"""


def told(process: DetailsProcess, seconds: float):
    """All that comes until nothing has for that long."""
    found = []
    while select.select([process], [], [], seconds)[0]:
        found += process.read()
    return found


def test_names_and_lines_are_the_kernel_s():
    fds = [
        programs.with_lines("lined", "a_function_with_lines", 3),
        programs.with_subprograms("parts", ["main_function_of_parts", "left_part", "right"], 5),
        programs.plain("plain_one", 4),
        programs.plain("", 4),
    ]
    try:
        names = rawbpf.kallsyms_bpf()
        reader = ProgramReader()
        for fd in fds:
            info = rawbpf.info(fd)
            known = reader.details(info.id)
            assert [(s, n) for s, n, _ in known.functions] == list(zip(info.starts, info.lens))
            assert [name for *_, name in known.functions] == [names[s] for s in info.starts]
            assert known.tag == info.tag
        rows = rawbpf.line_rows(fds[0])
        table = unpack_lines(reader.details(rawbpf.info(fds[0]).id).lines)
        start = rawbpf.info(fds[0]).starts[0]
        assert len(table) == len(rows) == 60
        for row in rows:
            assert table.find(0, row.address - start).line == row.line
    finally:
        rawbpf.close(*fds)


def test_a_trampoline_says_what_it_traces():
    process = DetailsProcess()
    tracer = BPF(text=b"KFUNC_PROBE(bpf_fentry_test1, int a) { return 0; }")
    try:
        names = [name for name in rawbpf.kallsyms_bpf().values() if "bpf_trampoline_" in name]
        targets = Targets()
        assert "bpf_fentry_test1" in [targets.name(trampoline_key(name)) for name in names]
        known = [one for one in told(process, 3) if one.target == "bpf_fentry_test1"]
        assert f"bpf_trampoline_{known[0].trampoline}" in names
    finally:
        tracer.cleanup()
        process.close()


@pytest.mark.slow
@pytest.mark.parametrize("life", [1, 10, 100])
def test_what_share_is_read_in_time(life, kernel):
    process = DetailsProcess()
    told(process, 3)
    process.counts.clear()
    procs.run([sys.executable, "-c", TURNS, "40", str(life)], 120)
    told(process, 1)
    process.finish()
    share = process.counts.get("", 0)
    os.makedirs("/job/out", exist_ok=True)
    with open("/job/out/lines-share.txt", "a") as file:
        file.write(f"{kernel} {life} ms: {process.summary()}\n")
    assert share + process.counts.get(GONE, 0) == 40
    # Here everything takes twenty times as long as on the machine around it.
    assert share >= {1: 0, 10: 12, 100: 38}[life], process.counts
