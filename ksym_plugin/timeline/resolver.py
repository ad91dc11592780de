"""Addresses and a time in, frames out: the one place that decides a name.

For an address that BPF or a module ever held, what was recorded of that time decides; for
any other the static tables do. An answer that is not certain says so, and an address without a
name comes with the reason.
"""

from __future__ import annotations

from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    BETWEEN,
    BPF_MODULE,
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
    Frame,
    Reason,
    Symbol,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from ksym_plugin.timeline.symbols import Lifetime
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


#: The lowest of perf's context markers (PERF_CONTEXT_MAX in linux/perf_event.h).
FIRST_MARKER = 0xFFFF_FFFF_FFFF_F001
_LAST = (1 << 64) - 1
#: On every 64-bit machine with a split address space the kernel has the upper half.
_KERNEL_HALF = 1 << 63
#: What the past says of an address that no BPF symbol ever had.
_NEVER_HELD = (UNKNOWN_ADDRESS, AMONG_BPF)
#: What it says of one that something had at another time.
_ABSENT = (NOT_LOADED, VACANT)


class Resolver:
    """Names kernel addresses as they were at a time (CLOCK_MONOTONIC ns).

    ``past`` and ``kallsyms`` may each be missing; with neither, nothing has a name.
    """

    def __init__(self, past: Lookup | None = None, kallsyms: Statics | None = None) -> None:
        self._past = past
        self._kallsyms = kallsyms
        self._fixed: dict[int, Frame | Reason] = {}
        self._extent = -1

    def resolve(self, address: int, time_ns: int) -> Frame | Reason:
        return self.frames((address,), time_ns)[0]

    def frames(self, addresses: Iterable[int], time_ns: int) -> list[Frame | Reason]:
        """A frame or a reason for each address, in order: a whole callchain per call."""
        past = self._past
        if past is not None and past.extent != self._extent:
            # Symbols came where none was: what was decided without them may change.
            self._extent = past.extent
            self._fixed.clear()
        fixed = self._fixed
        frames: list[Frame | Reason] = []
        for address in addresses:
            frame = fixed.get(address)
            frames.append(self._decide(address, time_ns) if frame is None else frame)
        return frames

    def is_kernel(self, address: int) -> bool:
        """Whether this is a kernel address, and no context marker."""
        if address >= _KERNEL_HALF:
            return address < FIRST_MARKER
        return self._kallsyms is not None and self._kallsyms.is_kernel(address)

    def _decide(self, address: int, time_ns: int) -> Frame | Reason:
        if not self.is_kernel(address):
            return CONTEXT_MARKER if FIRST_MARKER <= address <= _LAST else USER_ADDRESS
        verdict = UNKNOWN_ADDRESS
        if self._past is not None:
            lifetime, said = self._past.at(address, time_ns)
            if lifetime is not None:
                return named(address, lifetime, str(said))
            verdict = said if isinstance(said, Reason) else verdict
        if verdict is AMBIGUOUS or self._kallsyms is None:
            return verdict
        return self._static(address, verdict)

    def _static(self, address: int, verdict: Reason) -> Frame | Reason:
        """What the static tables say of an address whose past gave ``verdict``."""
        found = self._kallsyms.find(address) if self._kallsyms is not None else verdict
        # The table's BPF lines are of when it was read; the past knows them by time.
        known = isinstance(found, Symbol) and (self._past is None or found.module != BPF_MODULE)
        # So are its modules, where the past knows those.
        is_outside = self._past is None or verdict is OUTSIDE_HISTORY
        tells_modules = is_outside or not (self._past and self._past.has_modules)
        if isinstance(found, Symbol) and found.kind == MODULE:
            known = tells_modules
        if isinstance(found, Symbol) and known:
            frame: Frame | Reason = _frame(address, found, EXACT)
            if verdict in _NEVER_HELD or found.kind == KERNEL:
                self._fixed[address] = frame
            return frame
        if found is HIDDEN and verdict in _NEVER_HELD:
            return found
        # BPF was next to it, or there at another time; now it is a module's.
        if found is IN_MODULE and tells_modules and verdict in (*_NEVER_HELD, *_ABSENT):
            return found
        return verdict


def named(address: int, lifetime: Lifetime, certainty: str) -> Frame | Reason:
    """The frame of an address within a lifetime; of a module's, the function that holds it."""
    symbol, functions = lifetime.symbol, lifetime.functions
    if symbol.kind != MODULE:
        return _frame(address, symbol, certainty, lifetime)
    found = None if functions is None else functions.find(address - symbol.start)
    if found is None:
        return BETWEEN
    start, _, name = found
    offset = address - symbol.start - start
    return Frame(address, name, offset, symbol.module, MODULE, certainty, lifetime)


def _frame(address: int, symbol: Symbol, certainty: str, lifetime: Lifetime | None = None) -> Frame:
    return Frame(
        address,
        symbol.name,
        address - symbol.start,
        symbol.module,
        symbol.kind,
        certainty,
        lifetime,
    )
