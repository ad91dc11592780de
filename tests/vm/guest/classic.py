"""Runs classic BPF filters beside eBPF programs: ``python3 -m tests.vm.guest.classic TRUTH DATA``.

Where the kernel has put a filter it tells nobody. A kprobe on the return of
bpf_prog_select_runtime(), through which every filter goes, finds it in struct bpf_prog.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

from tests.oracle import programs, rawbpf, runner
from tests.vm.guest.around import sampled
from tests.vm.guest.structops import Struct, kernel_btf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_TRACING = Path("/sys/kernel/tracing")
_EVENT = "ksym_oracle/select_runtime"
_LD_IMM, _MUL, _ADD, _RET = 0x00, 0x24, 0x04, 0x06
_SO_ATTACH_FILTER = 26
_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER, _ALLOW = 38, 22, 2, 0x7FFF0000
#: net.core.optmem_max leaves room for no more than 2,500.
_LENGTH = 2_000
_SECONDS = 6.0


class Code:
    """A filter of ``_LENGTH`` sums, and as ``fprog`` the struct sock_fprog that points to it."""

    def __init__(self, result: int) -> None:
        steps = [(_MUL if step % 4 else _ADD, 2 * step + 3) for step in range(_LENGTH)]
        code = [(_LD_IMM, 7), *steps, (_RET, result)]
        packed = b"".join(struct.pack("=HBBI", what, 0, 0, value) for what, value in code)
        self._code = ctypes.create_string_buffer(packed, len(packed))
        self.fprog = struct.pack("@HP", len(code), ctypes.addressof(self._code))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While the kernel's trace tells where programs are put."""
    at = Struct(kernel_btf(), "bpf_prog").offsets
    fetch = f"start=+{at['bpf_func']}($retval):x64 len=+{at['jited_len']}($retval):u32"
    events = _TRACING / "kprobe_events"
    events.write_text(f"r:{_EVENT} bpf_prog_select_runtime {fetch}")
    enable = _TRACING / "events" / _EVENT / "enable"
    try:
        enable.write_text("1")
        yield
    finally:
        enable.write_text("0")
        events.write_text("")


def last_image() -> list[int]:
    """Where the program begins and ends that was put into place last."""
    line = [line for line in (_TRACING / "trace").read_text().splitlines() if "start=" in line][-1]
    told = dict(word.split("=") for word in line.split() if "=" in word)
    start = int(told["start"], 16)
    return [start, start + int(told["len"])]


class Socket:
    """A pair of sockets, what is sent through which a filter drops."""

    def __init__(self) -> None:
        self._to, self._from = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        code = Code(0)
        self._from.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, code.fprog)

    def pound(self) -> None:
        for _ in range(1_000):
            with contextlib.suppress(PermissionError):  # what a filter's no is for the sender
                self._to.send(b"x" * 64)


def filter_system_calls() -> None:
    """Have every system call of this process filtered, and allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = Code(_ALLOW)
    fprog = ctypes.create_string_buffer(code.fprog)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _MODE_FILTER, fprog):
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    before = programs.plain("before_the_filters", 31)
    # perf begins before the system calls of its parent are filtered, and so its own.
    with watched(), sampled(sys.argv[2], frequency=499):
        pair = Socket()
        socket_filter = last_image()
        after = programs.plain("after_the_first", 32)
        filter_system_calls()
        seccomp = last_image()
        names = rawbpf.kallsyms_bpf()
        began = time.monotonic_ns()
        while time.monotonic_ns() < began + _SECONDS * 1e9:
            pair.pound()
            for fd in (before, after):
                runner.burn(fd, 4_000_000)
        during = (began + time.monotonic_ns()) // 2
    infos = [rawbpf.info(fd) for fd in (before, after)]
    told = {
        "during": during,
        "classic": {"socket": socket_filter, "seccomp": seccomp},
        "named": [[i.starts[0], i.starts[0] + i.lens[0], names[i.starts[0]]] for i in infos],
        "symbols": sorted(names),
    }
    Path(sys.argv[1]).write_text(json.dumps(told))
    os.close(before)
    os.close(after)


if __name__ == "__main__":
    main()
