"""The kprobe and the fentry source: one probe in BPF, where all BPF symbols come and go."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import struct
import time
from array import array
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from ksym_plugin.kernel import privileges, syscalls
from ksym_plugin.kernel.bpf_prog import ProgramReader, measure
from ksym_plugin.kernel.perf_ring import online_text, parse_cpu_list, possible_count
from ksym_plugin.kernel.snapshot import Taker
from ksym_plugin.kernel.syscalls import Ticker
from ksym_plugin.sources.bcc_loader import KERNEL_BTF, BccProgram
from ksym_plugin.sources.probe_records import (
    ADD,
    DEL,
    Changes,
    Record,
    Streams,
    counts_of,
    has_ring,
    merged,
    open_rings,
)
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import OOL, Loss
from ksym_plugin.timeline.tracker import Source

if TYPE_CHECKING:
    from ksym_plugin.sources.probe_records import Counts
    from ksym_plugin.timeline.symbols import Load
    from ksym_plugin.timeline.tracker import Change

#: A record takes some 110 bytes: room for 10,000 loads and their unloads, nearly twice,
#: while nobody reads. It is kernel memory, taken as long as the source is open.
RING_BYTES = 4 << 20
#: The least time between two comparisons with what the probe has counted: for so long a
#: loss goes unnoticed that no record follows.
TICK = 1.0
_MAPS = ("streams", "events")
_MISSED_CAUSE = "the probe was busy"

PMU = "/sys/bus/event_source/devices/kprobe/type"
_FUNCTIONS = ("bpf_ksym_add", "bpf_ksym_del")
#: PERF_EVENT_IOC_SET_BPF, which is _IOW('$', 8, __u32), and PERF_EVENT_IOC_ENABLE.
_SET_BPF, _ENABLE = 0x40042408, 0x2400
if os.uname().machine.startswith("ppc"):
    _SET_BPF, _ENABLE = 0x80042408, 0x20002400

_SELF_TEST = "ksym_self_test"
_SOCKET_FILTER = 1  # BPF_PROG_TYPE_SOCKET_FILTER
_TRACING = 26  # BPF_PROG_TYPE_TRACING
_TRACE_FENTRY = 24  # BPF_TRACE_FENTRY
#: r0 = 0; exit
_CODE = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
#: union bpf_attr for BPF_PROG_LOAD: prog_type, insn_cnt, insns, license, log_level, log_size,
#: log_buf, kern_version, prog_flags, prog_name, prog_ifindex, expected_attach_type
_LOAD = struct.Struct("=IIQQIIQII16sII56x")


class KsymSource(Source):
    """Changes from a probe on bpf_ksym_add() and bpf_ksym_del().

    Times are exact: the probe takes them, just before the change. The ends of programs are the
    kernel's own, and those of images where it keeps them. ``read`` returns changes by time; one
    that another CPU is just reporting may come with the next read.
    """

    #: What the C source is compiled with, and what of it is loaded.
    flags: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def __init__(self, ring_bytes: int | None = None, ring: bool | None = None) -> None:
        """``ring_bytes`` is rounded up to a power of two; None is RING_BYTES.

        ``ring`` False is for perf buffers where there is a choice.
        """
        super().__init__()
        self._reader = ProgramReader()
        self._taker = Taker(True, self._reader)
        self._images_unsure = True
        self._lost_images = self._missed = 0
        self._records = self._lost = 0
        #: Records that no read has returned yet.
        self._taken: list[Record] = []
        with ExitStack() as stack:
            self._check(stack)
            use_ring = has_ring() if ring is None else ring
            size = RING_BYTES if ring_bytes is None else ring_bytes
            # A power of two, as the kernel wants it.
            pages = 1 << (max(1, -(-size // mmap.PAGESIZE)) - 1).bit_length()
            flags = [*self.flags, *([f"-DKSYM_RING_PAGES={pages}"] if use_ring else [])]
            self._program = stack.enter_context(closing(BccProgram(flags, self.programs, _MAPS)))
            self._open(stack, use_ring, pages * mmap.PAGESIZE)
            self._attach()
            self._begin()
            self._stack = stack.pop_all()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def snapshot(self) -> list[Load]:
        """It lacks what the probe does not see go: out-of-line code, programs without symbols."""
        images, self._images_unsure = self._images_unsure, True
        taken = self._taker.take(images)
        self._images_unsure = False
        self.notes = [taken.limit] if taken.limit else []
        self.lists_images = taken.lists_images
        return [load for load in taken.loads if load.symbol.kind != OOL]

    def read(self) -> list[Change]:
        ticked = self._ticker.clear()
        if ticked:
            self._rings.follow_cpus()
        losses = self._take()
        if ticked or losses:
            losses += self._compare()
        if losses:
            self._changes.forget()
        self._lost += sum(loss.count or 0 for loss in losses)
        records, self._taken = self._taken, []
        return [*merged(losses), *self._changes.of(records)]

    def measure(self) -> None:
        """Have the kernel measure what the probe costs, while the source is open."""
        try:
            self._stack.callback(os.close, measure())
        except OSError as error:
            raise SourceError(
                f"the cost of the probe cannot be measured ({error.strerror})",
                "run as root, on Linux 5.8 or later",
            ) from error

    def stats(self) -> dict[str, int]:
        """What has come, what was lost, and what the probe has cost.

        ``*_ns`` and ``*_runs`` count from ``measure`` on; they are 0 without it.
        """
        add, delete = (self._reader.info(fd) for fd in self._program.programs)
        return {
            "records": self._records,
            "lost": self._lost,
            "ring_bytes": self._rings.size,
            "add_runs": add.runs,
            "add_ns": add.run_ns,
            "del_runs": delete.runs,
            "del_ns": delete.run_ns,
        }

    def close(self) -> None:
        self._stack.close()

    def _check(self, stack: ExitStack) -> None:
        """SourceError where this cannot work; before anything that takes long."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Have the kernel run the programs, until what ``_check`` opened is closed."""

    def _open(self, stack: ExitStack, use_ring: bool, size: int) -> None:
        """Open the rings, and what is waited with."""
        self._cpus = possible_count()
        try:
            self._epoll = stack.enter_context(closing(select.epoll()))
            self._ticker = stack.enter_context(closing(Ticker(TICK)))
            self._epoll.register(self._ticker.fd, select.EPOLLIN)
            rings = open_rings(self._program.maps["events"], use_ring, size, self._epoll)
            self._rings = stack.enter_context(closing(rings))
        except OSError as error:
            raise SourceError(f"the probe's ring cannot be opened ({error.strerror})") from error

    def _begin(self) -> None:
        """From here on every change is returned, or counted as lost."""
        self._checked = time.monotonic_ns()
        self._streams = Streams(self._counts(), self._checked)
        self._missed = self._misses()
        length = self_test()
        self._take()
        self._changes = Changes(ends_are_exact(length, self._taken))

    def _take(self) -> list[Loss]:
        """Take the records there are; the losses their numbers show."""
        records = [Record.parse(data) for data in self._rings.take()]
        self._records += len(records)
        self._taken += records
        noted = [self._streams.note(record) for record in records]
        return [loss for loss in noted if loss is not None]

    def _compare(self) -> list[Loss]:
        """What the probe has counted, against what has come."""
        before = time.monotonic_ns()
        counted, missed = self._counts(), self._misses()
        after = time.monotonic_ns()
        losses = self._streams.compare(counted, before, after)
        if missed > self._missed:
            losses.append(Loss(self._checked, after, _MISSED_CAUSE, missed - self._missed))
        lost_images = sum(each.lost_images for cpus in counted for each in cpus)
        if lost_images > self._lost_images or missed > self._missed:
            self._images_unsure = True
        self._lost_images, self._missed, self._checked = lost_images, missed, before
        return losses

    def _counts(self) -> list[list[Counts]]:
        return counts_of(self._program.maps["streams"], self._cpus)

    def _misses(self) -> int:
        """How often the kernel did not run the programs since they were running."""
        return sum(self._reader.info(fd).misses for fd in self._program.programs)


class KprobeSource(KsymSource):
    """See ``KsymSource``. It needs CONFIG_KPROBE_EVENTS, bcc and the kernel's headers.

    The kprobes are perf events of the kernel's kprobe PMU, and so they go with the process,
    however it ends. bcc would fall back to entries in tracefs, which stay behind.
    """

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
        # One CPU's event makes the program run on all of them.
        cpu = parse_cpu_list(online_text())[0]
        self._events: list[int] = []
        for function in _FUNCTIONS:
            self._events.append(_open_kprobe(pmu, function, cpu))
            stack.callback(os.close, self._events[-1])

    def _attach(self) -> None:
        try:
            for event, program in zip(self._events, self._program.programs):
                fcntl.ioctl(event, _SET_BPF, program)
                fcntl.ioctl(event, _ENABLE, 0)
        except OSError as error:
            raise SourceError(f"the kprobes take no program ({error.strerror})") from error


class FentrySource(KsymSource):
    """See ``KsymSource``. It needs BPF trampolines, BTF, bcc and the kernel's headers."""

    name = "fentry"
    flags = ("-DKSYM_FENTRY",)
    #: bcc attaches them for their names.
    programs = ("kfunc__bpf_ksym_add", "kfunc__bpf_ksym_del")

    def _check(self, stack: ExitStack) -> None:
        if not os.path.exists(KERNEL_BTF):
            raise SourceError(
                f"this kernel has no BTF ({KERNEL_BTF})",
                "use a kernel with CONFIG_DEBUG_INFO_BTF, and mount /sys",
            )
        privileges.require_probes()
        try:
            # It is attached to nothing: only whether such programs are refused as such is tried.
            os.close(load_program(_TRACING, _TRACE_FENTRY))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                raise SourceError(
                    "this kernel does not let BPF programs trace its functions",
                    "use a kernel with CONFIG_FUNCTION_TRACER and without restrictions on BPF",
                ) from error


def _open_kprobe(pmu: int, function: str, cpu: int) -> int:
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


def self_test() -> int:
    """Load a program for the probe to see, and let it go; the length of its code."""
    try:
        fd = load_program(_SOCKET_FILTER, name=_SELF_TEST)
        try:
            return ProgramReader().info(fd).jited_length
        finally:
            os.close(fd)
    except OSError as error:
        raise SourceError(f"the probe cannot be tried ({error.strerror})") from error


def ends_are_exact(length: int, records: list[Record]) -> bool:
    """Whether the end of a program's symbol is that of its code, as far as can be known.

    ``length`` is that of the program tried, 0 where it is not JITed and so has no symbol.
    SourceError if the probe has not seen it come and go.
    """
    own = [record for record in records if record.name.endswith(f"_{_SELF_TEST}")]
    seen = {record.kind: record.length for record in own}
    if length and len(seen) < len((ADD, DEL)):
        raise SourceError(
            "the probe does not see programs come and go (the compiler of this kernel may "
            "have inlined bpf_ksym_add or bpf_ksym_del)",
            "use --source perf_event",
        )
    return not length or seen[ADD] == length


def load_program(type: int, attach_type: int = 0, name: str = "") -> int:
    """A descriptor of a program that does nothing; OSError where the kernel refuses it."""
    code, license_ = array("B", _CODE), array("B", b"GPL\0")
    pointers = code.buffer_info()[0], license_.buffer_info()[0]
    attr = _LOAD.pack(type, 2, *pointers, 0, 0, 0, 0, 0, name.encode(), 0, attach_type)
    return syscalls.bpf(syscalls.PROG_LOAD, array("B", attr))
