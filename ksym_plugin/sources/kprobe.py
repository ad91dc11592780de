"""The kprobe source: kprobes on the functions through which all BPF symbols go.

They are perf events of the kernel's kprobe PMU, and so they go with the process, however
it ends. bcc would fall back to entries in tracefs, which stay behind.
"""

from __future__ import annotations

import fcntl
import os
from array import array

from ksym_plugin.kernel import privileges, syscalls
from ksym_plugin.kernel.perf_ring import online_text, parse_cpu_list
from ksym_plugin.sources.probe import KsymSource
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import ExitStack

PMU = "/sys/bus/event_source/devices/kprobe/type"
_FUNCTIONS = ("bpf_ksym_add", "bpf_ksym_del")
#: PERF_EVENT_IOC_SET_BPF, which is _IOW('$', 8, __u32), and PERF_EVENT_IOC_ENABLE.
_SET_BPF = 0x40042408
_ENABLE = 0x2400
_POWERPC = {_SET_BPF: 0x80042408, _ENABLE: 0x20002400}


class KprobeSource(KsymSource):
    """See ``KsymSource``. It needs CONFIG_KPROBE_EVENTS, bcc and the kernel's headers."""

    name = "kprobe"
    programs = ("ksym_add", "ksym_del")

    def _check(self, stack: ExitStack) -> None:
        try:
            with open(PMU, encoding="ascii") as file:
                pmu = int(file.read())
        except FileNotFoundError as error:
            raise SourceError(
                "this kernel has no kprobes that perf_event_open(2) could make",
                "use a kernel with CONFIG_KPROBE_EVENTS, and mount /sys",
            ) from error
        privileges.require_probes()
        self._events: list[int] = []
        stack.callback(self._detach)
        cpu = parse_cpu_list(online_text())[0]
        for function in _FUNCTIONS:
            # One CPU's event makes the program run on all of them.
            self._events.append(_open(pmu, function, cpu))

    def _attach(self) -> None:
        try:
            for event, program in zip(self._events, self._program.programs):
                _ioctl(event, _SET_BPF, program)
                _ioctl(event, _ENABLE, 0)
        except OSError as error:
            raise SourceError(f"the kprobes take no program ({error.strerror})") from error

    def _detach(self) -> None:
        while self._events:
            os.close(self._events.pop())


def _open(pmu: int, function: str, cpu: int) -> int:
    name = array("B", function.encode() + b"\0")
    attr = syscalls.perf_event_attr(
        type=pmu,
        config=0,
        flags=syscalls.DISABLED,
        sample_period=1,
        config1=name.buffer_info()[0],
    )
    try:
        return syscalls.perf_event_open(attr, -1, cpu)
    except OSError as error:
        raise privileges.kprobe_refusal(error, function) from error


def _ioctl(event: int, request: int, argument: int) -> None:
    if os.uname().machine.startswith("ppc"):
        request = _POWERPC[request]
    fcntl.ioctl(event, request, argument)
