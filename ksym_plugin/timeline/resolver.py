"""Addresses and a time in, frames out: the one place that decides who was there.

For an address that BPF or a module ever had, what was recorded of that time decides; for
any other address the static tables do. An address without a name gets a reason.

A frame's address is where execution goes on: for the leaf this is the instruction itself, for
a caller the one after the call. So a caller's source line is that of the byte before.
"""

from __future__ import annotations

from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    BETWEEN,
    BPF_MODULE,
    BPF_PROG,
    BPF_TRAMPOLINE,
    CONTEXT_MARKER,
    EXACT,
    HIDDEN,
    IN_MODULE,
    KERNEL,
    MODULE,
    NOT_LOADED,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    USER_ADDRESS,
    VACANT,
    VSYSCALL_PAGE,
    Frame,
    Reason,
    Symbol,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation
    from ksym_plugin.timeline.timeline import Answer

    class Lookup(Protocol):
        """Who was where, when: a Timeline, or what a history holds of one boot."""

        @property
        def extent(self) -> int: ...
        @property
        def has_modules(self) -> bool: ...
        def at(self, address: int, time_ns: int, /) -> Answer: ...

    class Statics(Protocol):
        """What does not change: a Kallsyms, or an elf.Image in front of one."""

        def find(self, address: int, /) -> Symbol | Reason: ...
        def is_kernel(self, address: int, /) -> bool: ...

    class Lines(Protocol):
        """The source lines of programs and their names, and what trampolines trace."""

        def line(self, lifetime: Lifetime, offset: int, /) -> SourceLocation | None: ...
        def traced(self, lifetime: Lifetime, /) -> str | None: ...
        def program_name(self, lifetime: Lifetime, /) -> str | None: ...

    class KernelLines(Protocol):
        """The source lines of the kernel image, by addresses in memory."""

        def line(self, address: int, /) -> SourceLocation | None: ...


#: The lowest of perf's context markers (PERF_CONTEXT_MAX in linux/perf_event.h).
FIRST_MARKER = 0xFFFF_FFFF_FFFF_F001
_LAST = (1 << 64) - 1
#: On every 64-bit machine with a split address space the kernel has the upper half.
_KERNEL_HALF = 1 << 63
#: What a timeline says of an address that nothing in it ever had.
_NEVER_USED = (UNKNOWN_ADDRESS, AMONG_BPF)
#: What it says of one that something had at another time.
_ABSENT = (NOT_LOADED, VACANT)
#: Of so many addresses the last frame is kept.
_MOST_FRAMES = 1 << 15


class Resolver:
    """Names kernel addresses as they were at a time (CLOCK_MONOTONIC ns).

    ``timeline`` and ``statics`` may each be missing; with neither, nothing has a name.
    """

    def __init__(self, timeline: Lookup | None = None, statics: Statics | None = None) -> None:
        self._timeline = timeline
        self._statics = statics
        #: The answers of addresses that only the static tables know, for any time.
        self._fixed: dict[int, Frame | Reason] = {}
        self._extent = -1
        #: The last frame of an address that was in a lifetime.
        self._frames: dict[int, Frame] = {}

    def resolve(self, address: int, time_ns: int) -> Frame | Reason:
        frame = self._fixed_now().get(address)
        return self._decide(address, time_ns) if frame is None else frame

    def frames(self, addresses: Iterable[int], time_ns: int) -> list[Frame | Reason]:
        """A frame or a reason for each address, in order: a whole callchain per call."""
        fixed = self._fixed_now()
        frames: list[Frame | Reason] = []
        for address in addresses:
            frame = fixed.get(address)
            frames.append(self._decide(address, time_ns) if frame is None else frame)
        return frames

    def _fixed_now(self) -> dict[int, Frame | Reason]:
        timeline = self._timeline
        if timeline is not None and timeline.extent != self._extent:
            # Symbols came where none was: what was decided without them may change.
            self._extent = timeline.extent
            self._fixed.clear()
        return self._fixed

    def is_kernel(self, address: int) -> bool:
        """Whether this is a kernel address: no context marker, and not user code's [vsyscall]."""
        if address >= _KERNEL_HALF:
            return address < FIRST_MARKER and address >> 12 != VSYSCALL_PAGE
        return self._statics is not None and self._statics.is_kernel(address)

    def _decide(self, address: int, time_ns: int) -> Frame | Reason:
        if not self.is_kernel(address):
            return CONTEXT_MARKER if FIRST_MARKER <= address <= _LAST else USER_ADDRESS
        reason = UNKNOWN_ADDRESS
        if self._timeline is not None:
            lifetime, certainty = self._timeline.at(address, time_ns)
            if lifetime is not None:
                return self._named(address, lifetime, str(certainty))
            reason = certainty if isinstance(certainty, Reason) else reason
        if reason is AMBIGUOUS or self._statics is None:
            return reason
        return self._static(self._statics, address, reason)

    def _named(self, address: int, lifetime: Lifetime, certainty: str) -> Frame | Reason:
        frame = self._frames.get(address)
        if frame is not None and frame.lifetime is lifetime and frame.certainty == certainty:
            return frame
        found = named(address, lifetime, certainty)
        if isinstance(found, Frame):
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            self._frames[address] = found
        return found

    def _static(self, statics: Statics, address: int, reason: Reason) -> Frame | Reason:
        """What the static tables say of an address that the timeline has no name for."""
        found, timeline = statics.find(address), self._timeline
        # The tables' BPF and modules are those of when they were read: the timeline, where
        # it is told of them, knows them by time.
        has_modules = timeline is not None and timeline.has_modules
        has_modules = has_modules and reason is not OUTSIDE_HISTORY
        if isinstance(found, Symbol):
            is_bpf = found.module == BPF_MODULE and timeline is not None
            if is_bpf or (found.kind == MODULE and has_modules):
                return reason
            offset = address - found.start
            frame = Frame(address, found.name, offset, found.module, found.kind, EXACT)
            if reason in _NEVER_USED or found.kind == KERNEL:
                self._fixed[address] = frame
            return frame
        if found is HIDDEN and reason in _NEVER_USED:
            return found
        # BPF was next to it, or there at another time; now it is a module's.
        if found is IN_MODULE and not has_modules and reason in (*_NEVER_USED, *_ABSENT):
            return found
        return reason


def named(address: int, lifetime: Lifetime, certainty: str) -> Frame | Reason:
    """The frame of an address within a lifetime; of a module's, the function that holds it."""
    symbol, functions = lifetime.symbol, lifetime.functions
    name, offset = symbol.name, address - symbol.start
    if symbol.kind == MODULE:
        found = None if functions is None else functions.find(offset)
        if found is None:
            return BETWEEN
        start, _, name = found
        offset -= start
    return Frame(address, name, offset, symbol.module, symbol.kind, certainty, lifetime)


class Locator:
    """Finds the source locations of frames; ``image`` is None where the kernel's are not known."""

    def __init__(self, lines: Lines, image: KernelLines | None = None) -> None:
        self._lines = lines
        self._image = image

    def locate(self, frame: Frame, is_leaf: bool) -> Frame:
        """The frame with its source location and program, or what it traces as a trampoline."""
        lifetime, lines = frame.lifetime, self._lines
        if frame.kind == BPF_TRAMPOLINE and lifetime is not None:
            return frame.tracing(lines.traced(lifetime))
        if frame.kind == BPF_PROG and lifetime is not None:
            # What is before the first byte is another function's.
            offset = frame.offset if is_leaf else max(frame.offset - 1, 0)
            return frame.at(lines.line(lifetime, offset), lines.program_name(lifetime))
        if frame.kind == KERNEL:
            return frame.at(self.in_image(frame.address, frame.offset, is_leaf))
        return frame

    def in_image(self, address: int, offset: int | None, is_leaf: bool) -> SourceLocation | None:
        """The source location of a frame of the kernel image, ``offset`` into its function."""
        if self._image is None:
            return None
        return self._image.line(address if is_leaf or offset == 0 else address - 1)
