"""Has generated images run and be there: ``python3 -m tests.vm.guest.images TRUTH DATA``.

A trampoline to a program that traces getpgid(2), which is called; the dispatcher of XDP,
through which a program runs; and a congestion control made of BPF programs.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys
import time
from pathlib import Path

from tests.oracle import programs, rawbpf, runner
from tests.vm.guest.around import sampled
from tests.vm.guest.structops import CongestionControl, kernel_btf

TRACED = "__x64_sys_getpgid"
_TRACING, _FENTRY, _XDP = 26, 24, 6
_PROG_LOAD, _RAW_TRACEPOINT_OPEN = 5, 17
_RUNS = 1_500_000_000


def tracer() -> list[int]:
    """Descriptors of a small fentry program, and of what has attached it."""
    found = re.search(rf"^\[(\d+)\] FUNC '{TRACED}' ", kernel_btf(), re.M)
    assert found
    code = programs.burn(5, work=20) + programs.insn(0xB7) + programs.insn(0x95)
    insns = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"GPL")
    attr = bytearray(144)
    pointers = ctypes.addressof(insns), ctypes.addressof(license_)
    struct.pack_into("=IIQQ", attr, 0, _TRACING, len(code) // 8, *pointers)
    struct.pack_into("=16s", attr, 48, b"traces")
    struct.pack_into("=I", attr, 68, _FENTRY)
    struct.pack_into("=I", attr, 108, int(found[1]))
    program = rawbpf._bpf(_PROG_LOAD, attr)
    attr = bytearray(144)
    struct.pack_into("=QI", attr, 0, 0, program)
    return [program, rawbpf._bpf(_RAW_TRACEPOINT_OPEN, attr)]


def main() -> None:
    fds = tracer()
    xdp = programs.plain("through_dispatcher", 61, work=1, prog_type=_XDP)
    rawbpf.test_run(xdp, 1000)
    control = CongestionControl("ksym_images")
    names = rawbpf.kallsyms_bpf()
    with sampled(sys.argv[2], frequency=499):
        end = time.monotonic_ns() + _RUNS
        while time.monotonic_ns() < end:
            for _ in range(100):
                os.getpgid(0)
        runner.burn(xdp, _RUNS)
    told = {"pid": os.getpid(), "during": time.monotonic_ns(), "names": sorted(names.items())}
    Path(sys.argv[1]).write_text(json.dumps(told))
    control.close()
    rawbpf.close(xdp, *fds)


if __name__ == "__main__":
    main()
