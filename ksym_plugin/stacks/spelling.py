"""How a frame of perf script text is spelled in a folded stack.

The rules are those that users of FlameGraph's stackcollapse-perf.pl and of inferno know:
arguments, quotes and offsets go, a semicolon becomes a colon, a frame without a symbol is
named after its file, and a suffix says what kind of code it is.
"""

from __future__ import annotations

import re

from ksym_plugin.perf.text import INLINED, UNKNOWN
from ksym_plugin.timeline.symbols import split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.perf.text import FrameLine

_KERNEL_HALF_DIGITS: Final = b"89abcdef"
_BPF_DSO: Final = b"[bpf]"
_ANONYMOUS: Final = b"(anonymous namespace)"
#: A just-in-time compiler's inlined functions: ``A->B->C``; C++ has an operator of that name.
_INLINING: Final = re.compile(rb"(?<!operator)->")
#: Brackets, and C++'s operators that are spelled with some.
_BRACKET: Final = re.compile(rb"operator(?:->\*?|<=>|<<=?|>>=?|[<>]=?)|[<>(){}\[\]]")
_OPENING: Final = frozenset(b"<({[")
_MODULE_FILE: Final = re.compile(rb"\.ko(?:\.[a-z0-9]{2,4})?\Z")
_IMAGE_FILE: Final = re.compile(rb"vmlinux[A-Za-z0-9._-]*\Z")
_JIT_FILE: Final = re.compile(rb"/tmp/perf-[0-9]+\.map|/jitted-[^/]*\.so\Z")
#: What separates stacks, and C0: a folded file has one stack a line.
CONTROLS: Final = bytes.maketrans(bytes(range(32)) + b";", b" " * 32 + b":")
_QUOTES: Final = b"\"'"


class Style:
    """What is told of a frame besides its name; all off as stackcollapse-perf.pl has it.

    ``bpf`` gives BPF frames a suffix of their own, ``_[b]``; else they are the kernel's.
    """

    __slots__ = ("addrs", "bpf", "jit", "kernel")

    def __init__(
        self, kernel: bool = False, jit: bool = False, addrs: bool = False, bpf: bool = False
    ) -> None:
        self.kernel = kernel
        self.jit = jit
        self.addrs = addrs
        self.bpf = bpf


def spelled(frame: FrameLine, style: Style, is_java: bool) -> bytes:
    """A frame's part of a folded stack; empty if it has none.

    Functions that a JIT compiler has inlined become frames of their own, outermost first.
    """
    dso = frame.dso or UNKNOWN
    symbol = frame.name
    if not symbol and frame.dso is not None:
        symbol = UNKNOWN if frame.offset or not dso else b" "
    if symbol.startswith(b"(") and not symbol.startswith(_ANONYMOUS):
        return b""  # A task's name, as old perfs print it.
    suffix = _suffix(frame, dso, style)
    names: list[bytes] = []
    for name in _INLINING.split(symbol):
        tidy = tidied(_in_file(frame, dso, style) if name == UNKNOWN else name)
        if is_java and tidy.startswith(b"L") and b"/" in tidy:
            tidy = tidy[1:]
        end = b"_[i]" if names else suffix
        names.append(tidy if end in tidy else tidy + end)
    return b";".join(names)


def task(comm: bytes) -> bytes:
    """The name of a task as the first frame of its stacks."""
    return comm.translate(CONTROLS).replace(b" ", b"_")


def tidied(name: bytes) -> bytes:
    """A name without its arguments, quotes, and what separates frames and stacks."""
    return _without_arguments(name.translate(CONTROLS)).translate(None, _QUOTES)


def _without_arguments(name: bytes) -> bytes:
    """A name up to its outermost parenthesis; not Go's ``pkg.(*T).f`` nor a lambda's own."""
    if b"(" not in name:
        return name
    depth = 0
    for found in _BRACKET.finditer(name):
        at = found.start()
        if found.end() - at > 1:
            continue
        if name[at] not in _OPENING:
            depth = max(depth - 1, 0)
            continue
        if name[at] == 0x28 and depth == 0 and at:
            is_of_name = name.startswith(_ANONYMOUS, at) or name[at - 1] == 0x2E
            if not is_of_name:
                return name[:at]
        depth += 1
    return name


def _in_file(frame: FrameLine, dso: bytes, style: Style) -> bytes:
    """A frame without a symbol."""
    file = b"unknown" if dso in (UNKNOWN, b"") else dso.rpartition(b"/")[2]
    return b"[%s <%s>]" % (file, frame.digits) if style.addrs else b"[%s]" % file


def _suffix(frame: FrameLine, dso: bytes, style: Style) -> bytes:
    if style.bpf and is_bpf(frame):
        return b"_[b]"
    if style.kernel and is_kernel(frame):
        return b"_[k]"
    if style.jit and _JIT_FILE.search(dso):
        return b"_[j]"
    return b""


def is_bpf(frame: FrameLine) -> bool:
    """Whether a frame is in the kernel and says that it is BPF's."""
    if not _is_high(frame):
        return False
    if frame.dso == _BPF_DSO or (frame.dso not in (None, b"", UNKNOWN) and frame.dso == frame.name):
        return True
    name = frame.name.decode("ascii", "replace").rstrip("?")
    return split_bpf_name(name) is not None


def is_kernel(frame: FrameLine) -> bool:
    """Whether a frame is kernel code, by its file, or where that does not say by its address."""
    dso = frame.dso
    if dso is None:
        return _is_high(frame)
    if dso in (UNKNOWN, b"", INLINED):
        return False
    if dso.startswith(b"[") or _MODULE_FILE.search(dso) or _IMAGE_FILE.search(dso):
        return True
    return is_bpf(frame)


def _is_high(frame: FrameLine) -> bool:
    return len(frame.digits) == 16 and frame.digits[0] in _KERNEL_HALF_DIGITS
