"""bpf(2) and perf_event_open(2), which neither Python nor libc wraps.

Both are called by number through libc's syscall(3); a failed call is an OSError with the
kernel's errno. ctypes is loaded by the first call: who only reads histories does not pay for
it. File descriptors that come back are close-on-exec.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from array import array

from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: machine as uname(2) has it: (bpf, perf_event_open), from the kernel's tables.
_NUMBERS = {
    "x86_64": (321, 298),
    "s390x": (351, 331),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), (280, 241)),
    **dict.fromkeys(("ppc64", "ppc64le"), (361, 319)),
    **dict.fromkeys(("i386", "i486", "i586", "i686"), (357, 336)),
    **dict.fromkeys(("armv6l", "armv7l", "armv8l"), (386, 364)),
}
#: The machine of a 32-bit interpreter on a 64-bit kernel.
_COMPAT = {"x86_64": "i686", "aarch64": "armv7l"}

# enum bpf_cmd
MAP_CREATE = 0
MAP_LOOKUP_ELEM = 1
MAP_UPDATE_ELEM = 2
PROG_LOAD = 5
PROG_GET_NEXT_ID = 11
PROG_GET_FD_BY_ID = 13
OBJ_GET_INFO_BY_FD = 15
BTF_GET_FD_BY_ID = 19
ENABLE_STATS = 32

# enum perf_type_id, enum perf_sw_ids, enum perf_event_sample_format and _read_format
TYPE_SOFTWARE = 1
COUNT_SW_DUMMY = 9
COUNT_SW_BPF_OUTPUT = 10
SAMPLE_RAW = 1 << 10
FORMAT_LOST = 1 << 4

# The bits of perf_event_attr's flag word, counted from the first declared one.
DISABLED = 1 << 0
EXCLUDE_KERNEL = 1 << 5
EXCLUDE_HV = 1 << 6
COMM = 1 << 9
WATERMARK = 1 << 14
SAMPLE_ID_ALL = 1 << 18
USE_CLOCKID = 1 << 25
KSYMBOL = 1 << 29
BPF_EVENT = 1 << 30

_FLAG_FD_CLOEXEC = 8
_ATTR = struct.Struct("=IIQQQQQIIQQQQIiQIHH")

#: libc's syscall(3), what reads its errno, and the numbers of both calls.
_libc: tuple[Callable[..., int], Callable[[], int], tuple[int, int]] | None = None


class Ticker:
    """Makes ``fd`` readable every ``seconds``, until it is cleared."""

    def __init__(self, seconds: float) -> None:
        """OSError where there is no timerfd, or no descriptor left for it."""
        # os.timerfd_create() is Python 3.13's.
        import ctypes

        self._seconds = seconds
        self._due = time.monotonic() + seconds
        libc: Any = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        # struct itimerspec: interval and first expiry, each in seconds and ns
        parts = (int(seconds), int(seconds % 1 * 1e9)) * 2
        spec = (ctypes.c_long * 4)(*parts)
        if self.fd < 0 or libc.timerfd_settime(self.fd, 0, spec, None) < 0:
            error = ctypes.get_errno()
            self.close()
            raise OSError(error, os.strerror(error))

    def clear(self) -> bool:
        """Make ``fd`` unreadable until the next tick; whether there was one."""
        if time.monotonic() < self._due:
            # A read that fails would cost a tenth of what following a change does.
            return False
        try:
            ticks = int.from_bytes(os.read(self.fd, 8), sys.byteorder)
        except BlockingIOError:
            return False
        # Never behind the timer's next tick, however late this process was at any point.
        self._due += self._seconds * ticks
        return True

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def bpf(command: int, attr: array[int]) -> int:
    """bpf(2): the command's result; ``attr`` is the union bpf_attr, changed in place."""
    address, length = attr.buffer_info()
    return _call(0, command, address, length * attr.itemsize, 0, 0)


def object_info(fd: int, info: array[int]) -> None:
    """BPF_OBJ_GET_INFO_BY_FD: fill ``info`` with what the kernel knows of an object."""
    address, length = info.buffer_info()
    attr = struct.pack("=IIQ", fd, length * info.itemsize, address)
    bpf(OBJ_GET_INFO_BY_FD, array("B", attr))


def perf_event_open(attr: bytes, pid: int, cpu: int, group: int = -1) -> int:
    """perf_event_open(2): a close-on-exec file descriptor for ``attr``.

    ``pid`` -1 with a ``cpu`` means every task there, which needs CAP_PERFMON or
    kernel.perf_event_paranoid at 0 or below.
    """
    # The kernel writes to the attr's size field when it refuses it, so not into ``bytes``.
    copy = array("B", attr)
    return _call(1, copy.buffer_info()[0], pid, cpu, group, _FLAG_FD_CLOEXEC)


def perf_event_attr(  # noqa: PLR0913 - by name, as the fields are
    *,
    flags: int,
    type: int = TYPE_SOFTWARE,
    config: int = COUNT_SW_DUMMY,
    clockid: int = 0,
    wakeup_watermark: int = 0,
    sample_type: int = 0,
    sample_period: int = 0,
    read_format: int = 0,
    config1: int = 0,
) -> bytes:
    """A struct perf_event_attr of 112 bytes (PERF_ATTR_SIZE_VER5).

    By default it is of a dummy event, which makes side-band records alone. ``flags`` is a sum
    of this module's constants. ``wakeup_watermark`` counts bytes with WATERMARK; without that
    flag the field is ``wakeup_events``, which counts samples.
    """
    if sys.byteorder != "little":
        # The first bit-field of a 64-bit word is the highest bit there.
        flags = int(f"{flags:064b}"[::-1], 2)
    return _ATTR.pack(
        type, _ATTR.size, config, sample_period, sample_type, read_format, flags,
        wakeup_watermark, 0, config1, 0, 0, 0, 0, clockid, 0, 0, 0, 0,
    )  # fmt: skip


def _call(which: int, *arguments: int) -> int:
    global _libc
    if _libc is None:
        import ctypes

        function: Any = ctypes.CDLL(None, use_errno=True).syscall
        function.argtypes = [ctypes.c_long] * 6
        function.restype = ctypes.c_long
        numbers = numbers_for(os.uname().machine, struct.calcsize("P") == 4)
        _libc = (function, ctypes.get_errno, numbers)
    syscall, get_errno, numbers = _libc
    result = syscall(numbers[which], *arguments)
    if result < 0:
        error = get_errno()
        raise OSError(error, os.strerror(error))
    return result


def numbers_for(machine: str, is_32_bit: bool = False) -> tuple[int, int]:
    """The numbers of bpf and perf_event_open on ``machine``; SourceError if not known."""
    if is_32_bit:
        machine = _COMPAT.get(machine, machine)
    numbers = _NUMBERS.get(machine)
    if numbers is None:
        raise SourceError(
            f"the system call numbers of bpf and perf_event_open on {machine} are not known here",
            "add them to ksym_plugin/kernel/syscalls.py from the kernel's syscall table",
        )
    return numbers
