"""What the kernel says of a program that is open: its id, and what it has cost."""

from __future__ import annotations

import struct
from array import array

from ksym_plugin import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: struct bpf_prog_info up to recursion_misses; older kernels leave the end of it alone.
_SIZE: Final = 216
_JITED_LENGTH: Final = 16
_COST: Final = struct.Struct("=QQQ")  # run_time_ns, run_cnt, recursion_misses, at 192
_RUN_TIME: Final = 0


class Info:
    """``jited_length`` of the main function in bytes, 0 if it is not JITed.

    ``runs`` and ``run_ns`` are counted while somebody wants them: see ``measure``.
    ``misses`` counts when it was not run because it was running.
    """

    __slots__ = ("jited_length", "misses", "run_ns", "runs")

    def __init__(self, data: bytes) -> None:
        self.jited_length: int = struct.unpack_from("=I", data, _JITED_LENGTH)[0]
        self.run_ns, self.runs, self.misses = _COST.unpack_from(data, 192)


def read(fd: int) -> Info:
    """Ask about the program that ``fd`` holds."""
    info = array("B", bytes(_SIZE))
    attr = struct.pack("=IIQ", fd, len(info), info.buffer_info()[0])
    syscalls.bpf(syscalls.OBJ_GET_INFO_BY_FD, array("B", attr))
    return Info(info.tobytes())


def measure() -> int:
    """Have the kernel count run times of all programs while the descriptor is open."""
    return syscalls.bpf(syscalls.ENABLE_STATS, array("I", (_RUN_TIME,)))
