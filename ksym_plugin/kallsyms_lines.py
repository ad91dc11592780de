"""What one line of a kallsyms table says, and which of several names is the best.

The lines are those that ``kallsyms_text`` makes: 16 hex digits, the type, the name and
perhaps a TAB and the module in brackets.
"""

from __future__ import annotations

import re

from ksym_plugin.timeline.symbols import BPF_MODULE, KERNEL, MODULE, OOL, bpf_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: The modules the kernel makes up for pages of kprobes and ftrace (kernel/kallsyms.c).
_PSEUDO: Final = "__builtin__"

# Where the type and the name begin.
_TYPE: Final = 17
_NAME: Final = 19
_FUNCTIONS: Final = frozenset(b"tTwW")
_ENDS: Final = frozenset((b"_etext", b"_einittext"))
_MARKER: Final = re.compile(
    rb"_[se]?(?:init)?text|_end|__(?:start|stop)_.*|__init_(?:begin|end)"
    rb"|__(?:.*_)?(?:text|initcall|vectors|stubs|thunk)_(?:start|end)"
)
#: Of those, the borders behind which nothing of the section is left.
_END: Final = re.compile(
    rb"_e(?:init)?text|_end|__stop_.*|__init_end"
    rb"|__(?:.*_)?(?:text|initcall|vectors|stubs|thunk)_end"
)


def address_of(line: bytes) -> int:
    """The address a line begins with."""
    return int(line[:16], 16)


def past(address: int) -> bytes:
    """What sorts behind all lines of an address and before those of the next."""
    return b"%016x!" % address  # "!" follows the blank that ends the digits


def is_function(line: bytes) -> bool:
    """Whether the type is text or weak; everything else is data, or no place at all."""
    return line[_TYPE] in _FUNCTIONS


def is_text_end(line: bytes) -> bool:
    """Whether the line is where the kernel's text or init text ends, of whatever type:
    some kernels list ``_etext`` as data."""
    return _name(line) in _ENDS


def is_marker(line: bytes) -> bool:
    """Whether the name is that of a section's border rather than of a function."""
    return _MARKER.fullmatch(_name(line)) is not None


def is_end(line: bytes) -> bool:
    """Whether the name is that of a section's end: what follows it is not called so."""
    return _END.fullmatch(_name(line)) is not None


def in_core_image(line: bytes) -> bool:
    """Whether the line names no module."""
    return b"\t" not in line


def is_bpf(line: bytes) -> bool:
    """Whether the line is one of BPF's."""
    return line.endswith(b"\t[bpf]")


def named(lines: list[bytes], name: str) -> list[int]:
    """The positions of all lines of that name."""
    plain = b" " + name.encode(errors="replace")
    suffixed = plain + b"\t"
    return [
        index
        for index, line in enumerate(lines)
        if line.endswith(plain, _TYPE) or line.startswith(suffixed, _NAME - 1)
    ]


def split(line: bytes) -> tuple[str, str | None]:
    """The name and the module; of the modules only ``[bpf]`` keeps its brackets.

    Bytes that are no UTF-8 are shown escaped.
    """
    name, _, module = line[_NAME:].decode(errors="backslashreplace").partition("\t")
    if not module:
        return name, None
    return name, module if module == BPF_MODULE else module[1:-1]


def kind_of(name: str, module: str | None) -> str:
    """The kind of a symbol from where it is listed."""
    if module is None:
        return KERNEL
    if module == BPF_MODULE:
        return bpf_kind(name)
    return OOL if module.startswith(_PSEUDO) else MODULE


def preference(line: bytes) -> tuple[bool, bool, bool, int, int, bytes]:
    """Sorts the names of one address: strong before weak, global before local, functions
    before the marks of sections, few leading underscores, then the longer."""
    kind, name = line[_TYPE : _TYPE + 1], _name(line)
    underscores = len(name) - len(name.lstrip(b"_"))
    return kind in b"wW", kind.islower(), is_marker(line), underscores, -len(name), name


def _name(line: bytes) -> bytes:
    return line[_NAME:].partition(b"\t")[0]
