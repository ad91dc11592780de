"""The guest is what the other tests here take it for."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest
from bcc import BPF

from tests.oracle import procs, programs, rawbpf

_DEADLINE = 20.0

_PROBE = rb"""
#include <uapi/linux/ptrace.h>

/* How struct bpf_ksym begins. Including linux/bpf.h fails on 6.12: bcc 0.26 has its own uapi. */
struct ksym { u64 start; u64 end; char name[512]; };
struct seen { u64 start; u64 end; char name[128]; };
BPF_RINGBUF_OUTPUT(added, 16);

int on_add(struct pt_regs *ctx)
{
	struct ksym *ksym = (void *)PT_REGS_PARM1(ctx);
	struct seen *seen = added.ringbuf_reserve(sizeof(*seen));

	if (!seen)
		return 0;
	bpf_probe_read_kernel(&seen->start, sizeof(u64), &ksym->start);
	bpf_probe_read_kernel(&seen->end, sizeof(u64), &ksym->end);
	bpf_probe_read_kernel_str(seen->name, sizeof(seen->name), ksym->name);
	added.ringbuf_submit(seen, 0);
	return 0;
}
"""


class Seen(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("name", ctypes.c_char * 128))


def kernel_name(fd: int, name: str) -> str:
    return f"bpf_prog_{rawbpf.info(fd).tag}_{name}"


def test_the_kernel_is_the_one_asked_for(kernel: str) -> None:
    assert os.uname().release.startswith(f"{kernel}.")
    assert os.geteuid() == 0


def test_bpf_answers_and_kallsyms_tells() -> None:
    fd = programs.plain("answers", 11)
    try:
        name = kernel_name(fd, "answers")
        assert rawbpf.kallsyms_bpf()[rawbpf.info(fd).starts[0]] == name
    finally:
        os.close(fd)
    # It is freed a grace period later.
    deadline = time.monotonic() + _DEADLINE
    while name in rawbpf.kallsyms_bpf().values() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert name not in rawbpf.kallsyms_bpf().values()


def test_a_kprobe_sees_what_is_added() -> None:
    added: dict[str, tuple[int, int]] = {}

    def take(_context: object, data: int, _size: int) -> None:
        seen = ctypes.cast(data, ctypes.POINTER(Seen)).contents
        added[seen.name.decode()] = seen.start, seen.end

    probe = BPF(text=_PROBE, cflags=["-w"])
    fd = -1
    try:
        probe.attach_kprobe(event=b"bpf_ksym_add", fn_name=b"on_add")
        probe[b"added"].open_ring_buffer(take)
        fd = programs.plain("probed", 12)
        probe.ring_buffer_consume()
        info = rawbpf.info(fd)
        name = kernel_name(fd, "probed")
        assert added[name] == (info.starts[0], info.starts[0] + info.lens[0])
    finally:
        if fd >= 0:
            os.close(fd)
        probe.cleanup()
    assert Path("/sys/kernel/debug/kprobes/list").read_text() == ""


def test_perf_samples_and_embeds_python(perf: str, tmp_path: Path) -> None:
    data, script = str(tmp_path / "perf.data"), tmp_path / "count.py"
    script.write_text(
        "n = 0\n"
        "def process_event(d):\n global n; n += d['sample']['ip'] > 0\n"
        "def trace_end():\n print('samples', n)\n"
    )
    burn = ["sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"]
    procs.run([perf, "record", "-q", "-g", "-e", "cpu-clock", "-o", data, "--", *burn], 60)
    text = procs.run([perf, "script", "-i", data, "-F", "comm,ip,sym"], 60).out
    told = procs.run([perf, "script", "-i", data, "-s", str(script)], 60).out
    assert text.count("sh ") > 10
    assert int(told.split("samples ")[1].split()[0]) > 10


def test_both_perfs_are_there(perf: str, request: pytest.FixtureRequest) -> None:
    series = request.node.callspec.id.split("-")[1]
    assert procs.run([perf, "version"], 30).out.startswith(f"perf version {series}.")
