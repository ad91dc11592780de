"""What a symbol, a change, a lifetime, a frame and a reason are.

Addresses are unsigned Python ints; ends are exclusive. Times are CLOCK_MONOTONIC
nanoseconds. What is not known to the nanosecond is a window ``earliest`` to
``latest``, both inclusive; an exact time has both equal.
"""

from __future__ import annotations

import re
from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ksym_plugin.timeline.packed import PackedFunctions

    R = TypeVar("R", bound="Record")

KERNEL = "kernel"
MODULE = "module"
BPF_PROG = "bpf_prog"
BPF_TRAMPOLINE = "bpf_trampoline"
BPF_DISPATCHER = "bpf_dispatcher"
BPF_STRUCT_OPS = "bpf_struct_ops"
OTHER_BPF = "other_bpf"
OOL = "ool"

#: The module name the kernel itself gives to everything BPF (kernel/kallsyms.c).
BPF_MODULE = "[bpf]"

#: x86's [vsyscall], which user code runs in the upper half, at a fixed address (VSYSCALL_ADDR
#: in uapi/asm/vsyscall.h). Nobody else has code there.
VSYSCALL_PAGE = 0xFFFF_FFFF_FF60_0

#: How certain a name is. EXACT: no other symbol can have been there. GRACE: it was unloaded
#: before, but may still be running. GAP: changes may have been lost around that time.
EXACT = "exact"
GRACE = "grace"
GAP = "gap"

_TRAMPOLINE = "bpf_trampoline_"
_IMAGE_PREFIXES = (
    (_TRAMPOLINE, BPF_TRAMPOLINE),
    ("bpf_dispatcher_", BPF_DISPATCHER),
    ("bpf__", BPF_STRUCT_OPS),
)
_PROG_NAME = re.compile(r"bpf_prog_([0-9a-f]{16})(?:_(.*))?", re.DOTALL)
_new = tuple.__new__

#: Shown where the kernel announced a BPF symbol without its name (Linux 0108a4e9f358
#: until 0be9ae5486cd did so for main programs with subprograms).
UNNAMED_BPF = "[bpf: name unknown]"


class Symbol:
    """A named range of kernel addresses; immutable by convention, compared by value."""

    __slots__ = ("end", "kind", "module", "name", "start")

    def __init__(self, start: int, end: int, name: str, kind: str, module: str | None) -> None:
        self.start = start
        self.end = end
        self.name = name
        self.kind = kind
        self.module = module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Symbol({self.start:#x}-{self.end:#x} {self.name} {self.module or ''})"

    def _key(self) -> tuple[int, int, str, str, str | None]:
        return (self.start, self.end, self.name, self.kind, self.module)


class Load:
    """A symbol appeared in the window ``earliest`` to ``latest``.

    ``prog_id`` is the BPF program's id where the source knows it. ``open_ended`` says
    that ``symbol.end`` is an upper bound only: PERF_RECORD_KSYMBOL gives every image
    the length 4096, and kallsyms has no lengths at all. ``pid`` and ``comm`` are the
    loading task's, where known. ``functions`` are those of a module, None for all else.
    """

    __slots__ = (
        "comm", "earliest", "functions", "latest", "open_ended", "pid", "prog_id", "symbol",
    )  # fmt: skip

    def __init__(
        self,
        symbol: Symbol,
        earliest: int,
        latest: int,
        prog_id: int | None = None,
        open_ended: bool = False,
        pid: int | None = None,
        comm: str | None = None,
        functions: PackedFunctions | None = None,
    ) -> None:
        self.symbol = symbol
        self.functions = functions
        self.earliest = earliest
        self.latest = latest
        self.prog_id = prog_id
        self.open_ended = open_ended
        self.pid = pid
        self.comm = comm

    def __repr__(self) -> str:
        return f"Load({self.symbol!r}, {self.earliest}..{self.latest}, id={self.prog_id})"


class Unload:
    """The symbol starting at ``start`` went away in the window ``earliest`` to ``latest``.

    ``name`` and ``prog_id`` narrow down which symbol is meant, where the source knows
    them; with neither, whatever starts there.
    """

    __slots__ = ("earliest", "latest", "name", "prog_id", "start")

    def __init__(
        self,
        start: int,
        earliest: int,
        latest: int,
        name: str | None = None,
        prog_id: int | None = None,
    ) -> None:
        self.start = start
        self.earliest = earliest
        self.latest = latest
        self.name = name
        self.prog_id = prog_id

    def __repr__(self) -> str:
        who = f"{self.name}, id={self.prog_id}"
        return f"Unload({self.start:#x} {who}, {self.earliest}..{self.latest})"


class Loss:
    """Changes between ``since`` and ``until`` may have been lost; ``count`` if known."""

    __slots__ = ("cause", "count", "since", "until")

    def __init__(self, since: int, until: int, cause: str, count: int | None = None) -> None:
        self.since = since
        self.until = until
        self.cause = cause
        self.count = count

    def __repr__(self) -> str:
        return f"Loss({self.since}..{self.until}, {self.cause}, count={self.count})"


class Lifetime:
    """A symbol and when it was there.

    ``unloaded_earliest`` and ``unloaded_latest`` are None while it is live. A module's symbol
    is a stretch of its code; ``functions`` has the names in it, and is None for all else.
    """

    __slots__ = (
        "comm", "functions", "loaded_by", "loaded_earliest", "loaded_latest", "open_ended", "pid",
        "prog_id", "row", "symbol", "unload", "unloaded_earliest", "unloaded_latest",
    )  # fmt: skip

    def __init__(self, load: Load) -> None:
        self.symbol = load.symbol
        self.loaded_earliest = load.earliest
        self.loaded_latest = load.latest
        #: ``loaded_latest`` by the load's reports alone: the unload may have been before.
        self.loaded_by = load.latest
        self.unloaded_earliest: int | None = None
        self.unloaded_latest: int | None = None
        #: The report that ended it, for pairing anew when an older report arrives late.
        self.unload: Unload | None = None
        self.prog_id = load.prog_id
        self.open_ended = load.open_ended
        self.pid = load.pid
        self.comm = load.comm
        self.functions = load.functions
        #: The history's row for this lifetime, 0 until it has one.
        self.row = 0

    def __repr__(self) -> str:
        unloaded = "" if self.unloaded_latest is None else self.unloaded_latest
        loaded = f"{self.loaded_earliest}..{self.loaded_latest}"
        return f"Lifetime({self.symbol!r}, loaded {loaded}, unloaded {unloaded})"


class Record(tuple[object, ...]):
    """A tuple whose items are attributes too: a named tuple, without importing ``typing``."""

    __slots__ = ()

    def __new__(cls: type[R], *items: object) -> R:
        return _new(cls, items)

    def __init_subclass__(cls) -> None:
        for index, name in enumerate(cls.__annotations__):
            setattr(cls, name, property(itemgetter(index)))

    def __reduce__(self) -> tuple[object, ...]:
        # For ``copy`` and ``pickle``.
        return _new, (type(self), tuple(self))


class SourceLocation(Record):
    """A file and a line; ``text`` is the line itself, empty where it is not known."""

    __slots__ = ()
    file: str
    line: int
    text: str

    def __new__(cls, file: str, line: int, text: str = "") -> SourceLocation:
        return _new(cls, (file, line, text))

    def __repr__(self) -> str:
        return f"SourceLocation({self.file}:{self.line})"


class Frame(Record):
    """One stack entry with its name; immutable.

    ``offset`` is that into the symbol; ``module`` is ``[bpf]``, a module's name, or None for
    the core image; ``certainty`` is EXACT, GRACE or GAP. ``lifetime`` is None for a static
    symbol. ``location`` is the source location, ``traced`` the kernel function that a trampoline
    belongs to, and ``program`` the name of the main function of a function's program; they are
    None unless asked for and known.
    """

    __slots__ = ()
    address: int
    name: str
    offset: int
    module: str | None
    kind: str
    certainty: str
    lifetime: Lifetime | None
    location: SourceLocation | None
    traced: str | None
    program: str | None

    def __new__(
        cls,
        address: int,
        name: str,
        offset: int,
        module: str | None,
        kind: str,
        certainty: str,
        lifetime: Lifetime | None = None,
        location: SourceLocation | None = None,
    ) -> Frame:
        fixed = (address, name, offset, module, kind, certainty, lifetime, location)
        return _new(cls, (*fixed, None, None))

    def at(self, location: SourceLocation | None, program: str | None = None) -> Frame:
        """This frame with a source location, and the name of its program."""
        return _new(Frame, (*self[:7], location, None, program))

    def tracing(self, function: str | None) -> Frame:
        """This frame with the function that it traces."""
        return _new(Frame, (*self[:7], None, function, None))

    def __repr__(self) -> str:
        return f"Frame({self.address:#x} {self.name}+{self.offset:#x} {self.certainty})"


class Reason:
    """Why an address has no name. One object per reason: compare with ``is``."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Reason({self.text})"


UNKNOWN_ADDRESS = Reason("no symbol is known at this address")
#: Classic BPF is JITed into the same areas as programs, and the kernel announces none of it.
AMONG_BPF = Reason(
    "code without a name among BPF programs, as classic BPF filters (seccomp, sockets) are"
)
IN_MODULE = Reason("no symbol is known at this address of a module")
NOT_LOADED = Reason(
    "nothing with a name was loaded at this address at that time (classic BPF filters have none)"
)
#: No BPF is near: something else, such as a module, was there at another time.
VACANT = Reason("nothing was loaded at this address at that time")
BETWEEN = Reason("a module was here, but none of its functions")
AMBIGUOUS = Reason("two symbols followed each other here too closely to tell")
LOST = Reason("changes around that time may have been lost")
OUTSIDE_HISTORY = Reason("the history does not cover that time")
HIDDEN = Reason("kernel addresses are hidden (kptr_restrict or no CAP_SYSLOG)")
CONTEXT_MARKER = Reason("a perf context marker, not a frame")
USER_ADDRESS = Reason("a user address")


def split_bpf_name(name: str) -> tuple[str, str] | None:
    """The tag and the program's own name in ``bpf_prog_<16 hex digits>[_<name>]``.

    The name is empty where the kernel gave none. Anything else, also a kernel function
    such as ``bpf_prog_run``, is None. The grammar is that of bpf_get_prog_name() in
    kernel/bpf/core.c.
    """
    found = _PROG_NAME.fullmatch(name)
    return None if found is None else (found[1], found[2] or "")


def bpf_kind(name: str) -> str:
    """The kind of a symbol that is known to be BPF's, from its name."""
    if not name or split_bpf_name(name) is not None or name == UNNAMED_BPF:
        return BPF_PROG
    for prefix, kind in _IMAGE_PREFIXES:
        if name.startswith(prefix):
            return kind
    return OTHER_BPF


def trampoline_key(name: str) -> int | None:
    """The number in a trampoline's name, None in any other name; it fits 63 bits."""
    digits = name[len(_TRAMPOLINE) :]
    is_key = name.startswith(_TRAMPOLINE) and digits.isdecimal() and len(digits) <= 18
    return int(digits) if is_key else None


def is_image(kind: str) -> bool:
    """Whether symbols of this kind are generated images, whose lengths perf rounds up."""
    return kind in (BPF_TRAMPOLINE, BPF_DISPATCHER, BPF_STRUCT_OPS)
