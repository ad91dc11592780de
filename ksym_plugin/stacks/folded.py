"""Folded stacks: ``root;…;leaf count``, one line a stack, and what a frame in one is.

The text is other people's: whatever is no stack is counted and left out. A frame says
what it is by its end, as FlameGraph's tools write it: ``_[k]`` kernel, ``_[j]`` compiled
at run time, ``_[i]`` inlined, and here also ``_[b]`` for BPF. What BPF programs the
kernel names are known without it.
"""

from __future__ import annotations

import re

from ksym_plugin.timeline.symbols import split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

_LONGEST: Final = 500


def readable(text: str) -> str:
    """``text`` as one can read it: what has no look is escaped, what is endless is cut.

    What is left is valid in XML 1.0: the characters it forbids are none that print.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code == 0xA0:
        return " "
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def cut(name: str, room: int) -> str:
    """The beginning of a name that fits into so many columns; nothing if that says nothing."""
    if room < 3:
        return ""
    if name.isascii():
        return name if len(name) <= room else f"{name[: room - 1]}…"
    import unicodedata

    used = 0
    for at, character in enumerate(name):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > room:
            return f"{name[: max(0, at - 1)]}…"
    return name


def escaped(text: str) -> str:
    """``text`` for the inside of an XML element."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


BPF: Final = "bpf"
KERNEL: Final = "kernel"
PYTHON: Final = "python"
JIT: Final = "jit"
INLINED: Final = "inlined"
USER: Final = "user"
UNKNOWN: Final = "unknown"

_SUFFIXES: Final = {"_[k]": KERNEL, "_[b]": BPF, "_[j]": JIT, "_[i]": INLINED}
#: What py-spy --subprocesses begins a stack with: command lines, which may hold anything.
_PROCESSES: Final = re.compile(r'(?:process \d+:".*?"(?:;|\Z))+', re.DOTALL)
_COMMAND_LINE: Final = re.compile(r'(process \d+:".*?")(?=;|\Z)', re.DOTALL)
#: Long enough for any real count, short enough for any reader's numbers.
_DIGITS: Final = 18
#: Also what ``ksym pyspy`` writes where it does not know the Python side.
_UNKNOWN_NAMES: Final = ("[unknown", "[python ", "[no python ")
_TRAMPOLINE: Final = "bpf_trampoline_"


class StackFrame:
    """A frame of a stack: its name, what kind of code it is, and its source where known."""

    __slots__ = ("file", "kind", "line", "name")

    def __init__(self, name: str, kind: str, file: str = "", line: int = 0) -> None:
        self.name = name
        self.kind = kind
        self.file = file
        self.line = line


class Stacks:
    """Distinct stacks and their counts; ``skipped`` lines held none."""

    __slots__ = ("counts", "skipped")

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.skipped = 0


def parse(lines: Iterable[bytes]) -> Stacks:
    """The stacks of a folded text; equal ones are added up.

    Counts may have decimals. Where every line ends in two numbers the text is a
    difference of two profiles, and the second is taken. Bytes that are not UTF-8 are
    kept as surrogates.
    """
    stacks = Stacks()
    counts = stacks.counts
    doubles = 0
    total = 0
    for line in lines:
        stack, number = _split(line)
        count = _number(number)
        if count is None or not stack:
            stacks.skipped += bool(line.strip())
            continue
        total += 1
        doubles += _number(_split(stack)[1]) is not None
        text = stack.decode("utf-8", "surrogateescape")
        counts[text] = counts.get(text, 0) + count
    if total and doubles == total:
        stacks.counts = _without_first_number(counts)
    return _tidied(stacks)


def _split(line: bytes) -> tuple[bytes, bytes]:
    """What stands before the last blank, and after it."""
    parts = line.rsplit(None, 1)
    if len(parts) == 1:  # Also ``; 5``, a frame without a name.
        return b"", parts[0]
    return (parts[0], parts[1]) if parts else (b"", b"")


def _number(text: bytes) -> float | None:
    whole, dot, decimals = text.partition(b".")
    if not whole.isdigit() or len(text) > _DIGITS or (decimals and not decimals.isdigit()):
        return None
    return float(text) if dot else int(whole)


def _without_first_number(counts: dict[str, float]) -> dict[str, float]:
    single: dict[str, float] = {}
    for text, count in counts.items():
        stack = text.rsplit(None, 1)[0]
        single[stack] = single.get(stack, 0) + count
    return single


def _tidied(stacks: Stacks) -> Stacks:
    """Without what counts nothing, and with the frames whole that a semicolon has split."""
    counts: dict[str, float] = {}
    for stack, count in stacks.counts.items():
        if count:
            # ``Ljava/io/File;::read``: no frame begins with two colons of its own accord.
            whole = _in_one_frame_each(stack.lstrip("\ufeff")).replace(";::", ":::")
            counts[whole] = counts.get(whole, 0) + count
    stacks.counts = counts
    return stacks


def _in_one_frame_each(stack: str) -> str:
    """A stack whose command lines, if it begins with any, are frames without semicolons."""
    found = _PROCESSES.match(stack) if stack.startswith("process ") else None
    if found is None:
        return stack
    lines = _COMMAND_LINE.sub(lambda line: line[1].replace(";", ":"), found[0])
    return lines + stack[found.end() :]


def frame_of(text: str) -> StackFrame:
    """What a frame of a folded stack is."""
    kind = _SUFFIXES.get(text[-4:])
    name = text[:-4] if kind else text
    if kind in (None, KERNEL) and _is_bpf(name):
        return StackFrame(name, BPF)
    if kind:
        return StackFrame(name or "[unknown]", kind)
    if name.startswith("py::"):
        return _by_perf_map(name)
    if name.endswith(")"):
        return _by_location(name)
    return StackFrame(name or "[unknown]", USER if _is_known(name) else UNKNOWN)


def _is_known(name: str) -> bool:
    return bool(name) and not name.startswith(_UNKNOWN_NAMES)


def _is_bpf(name: str) -> bool:
    """Whether only the kernel's BPF code can have this name."""
    if name.startswith(_TRAMPOLINE):
        return name[len(_TRAMPOLINE) :].rstrip("?").isdigit()
    return split_bpf_name(name.rstrip("?")) is not None


def _by_perf_map(name: str) -> StackFrame:
    """``py::function:/path/file.py``, as CPython writes for perf (Python/perf_trampoline.c)."""
    _, _, rest = name.partition("::")
    function, _, file = rest.rpartition(":")
    return StackFrame(function or rest, PYTHON, file if function else "")


def _by_location(name: str) -> StackFrame:
    """``function (file.py:12)``, as py-spy writes; any other parenthesis belongs to the name."""
    function, _, place = name[:-1].rpartition(" (")
    file, _, line = place.rpartition(":")
    file, line = (file, line) if line.isdigit() and len(line) <= _DIGITS else (place, "0")
    if function and (file.endswith(".py") or file.startswith("<")):
        return StackFrame(function, PYTHON, file, int(line))
    return StackFrame(name, USER if _is_known(name) else UNKNOWN)
