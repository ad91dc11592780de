"""What a sample is, whichever reader made it.

A callchain is bytes: addresses of 64 bits in this machine's byte order, leaf first, and
among them the PERF_CONTEXT markers that the kernel writes (include/uapi/linux/perf_event.h).
So it is a cheap key: what is made of a callchain can be kept by its bytes, and ``frames``
has to take it apart only once.
"""

from __future__ import annotations

from ksym_plugin.timeline.resolver import FIRST_MARKER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.perf.data_events import Layout

KERNEL = "kernel"
USER = "user"
#: What ran in a virtual machine, its kernel and its programs.
GUEST = "guest"
HYPERVISOR = "hypervisor"

_MODULUS = 1 << 64
#: The marker that a region begins with: PERF_CONTEXT_KERNEL, _USER, _GUEST and _HV.
MARKERS = {
    KERNEL: _MODULUS - 128,
    USER: _MODULUS - 512,
    GUEST: _MODULUS - 2048,
    HYPERVISOR: _MODULUS - 32,
}
_REGIONS = {marker: region for region, marker in MARKERS.items()}
#: PERF_CONTEXT_GUEST_KERNEL and _GUEST_USER.
_REGIONS.update(dict.fromkeys((_MODULUS - 2176, _MODULUS - 2560), GUEST))
#: PERF_CONTEXTUSER_DEFERRED: the user's part comes in a later record, and what follows is the
#: number of that (perf record --call-graph fp,defer).
USER_DEFERRED = _MODULUS - 640
#: Kernel addresses have the highest bit, on 64-bit kernels but s390's and SPARC's.
_KERNEL_HALF = 1 << 63


class Sample:
    """One sample. ``time`` is ns of the event's clock, None where none was recorded.

    ``pid``, ``tid`` and ``cpu`` are -1 where they were not recorded. ``callchain`` has at
    least the address at which the sample was taken. It ends with the kernel's part where the
    user's was recorded in a form that only perf reads (perf record --call-graph dwarf, or lbr).
    """

    __slots__ = ("callchain", "comm", "cpu", "event", "period", "pid", "tid", "time")

    def __init__(
        self,
        event: Layout,
        comm: str,
        pid: int,
        tid: int,
        cpu: int,
        time: int | None,
        period: int,
        callchain: bytes,
    ) -> None:
        self.event = event
        self.comm = comm
        self.pid = pid
        self.tid = tid
        self.cpu = cpu
        self.time = time
        self.period = period
        self.callchain = callchain

    def frames(self) -> tuple[tuple[int, str], ...]:
        """Address and region of each frame, leaf first."""
        return frames(self.callchain)


def frames(callchain: bytes) -> tuple[tuple[int, str], ...]:
    """Address and region of each frame, leaf first.

    Markers set the region. Where none stands, the kernel's part is what has the highest
    bit, up to the first user address. Nothing behind a user address is the kernel's,
    whatever it looks like: a user's stack, which the rest was read from, can hold anything.
    """
    found: list[tuple[int, str]] = []
    region: str | None = None
    for address in memoryview(callchain).cast("Q"):
        if address >= FIRST_MARKER:
            if region is USER:
                continue
            if address == USER_DEFERRED:
                break
            region = _REGIONS.get(address, region)
            continue
        if address < _KERNEL_HALF and region in (KERNEL, None):
            region = USER
        found.append((address, region or KERNEL))
    return tuple(found)
