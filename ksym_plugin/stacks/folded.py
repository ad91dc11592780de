"""Folded stacks: ``root;…;leaf count``, one line a stack, and what a frame in one is.

The text is other people's: lines that hold no stack are counted and left out. The end of a
frame tells its kind, as FlameGraph's tools write it: ``_[k]`` kernel, ``_[j]`` compiled at
run time, ``_[i]`` inlined, and here also ``_[b]`` for BPF. The names that the kernel gives
to BPF programs tell it without that.
"""

from __future__ import annotations

import re

from ksym_plugin.stacks.frames import (
    BPF,
    INLINED,
    JIT,
    KERNEL,
    PYTHON,
    UNKNOWN,
    USER,
    FrameTable,
    StackFrame,
    Stacks,
)
from ksym_plugin.timeline.symbols import SourceLocation, split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ksym_plugin.stacks.frames import Stack

_KINDS = {"_[k]": KERNEL, "_[b]": BPF, "_[j]": JIT, "_[i]": INLINED}
#: What py-spy --subprocesses begins a stack with: command lines, which may hold anything.
_PROCESSES = re.compile(r'(?:process \d+:".*?"(?:;|\Z))+', re.DOTALL)
_COMMAND_LINE = re.compile(r'(process \d+:".*?")(?=;|\Z)', re.DOTALL)
#: Long enough for any real count, short enough for any reader's numbers.
_DIGITS = 18
#: Also what ``ksym pyspy`` writes where it does not know the Python side.
_UNKNOWN_NAMES = ("[unknown", "[python ", "[no python ")
_TRAMPOLINE = "bpf_trampoline_"


def parse(lines: Iterable[bytes]) -> Stacks:
    """The stacks of a folded text; equal ones are added up.

    Counts may have decimals. Where every line ends in two numbers the text is a
    difference of two profiles, and the second is taken. Bytes that are not UTF-8 are
    kept as surrogates.
    """
    counts: dict[str, float] = {}
    skipped = 0
    doubles = 0
    total = 0
    for line in lines:
        stack, number = _split(line)
        count = _number(number)
        if count is None or not stack:
            skipped += bool(line.strip())
            continue
        total += 1
        doubles += _number(_split(stack)[1]) is not None
        text = stack.decode("utf-8", "surrogateescape")
        counts[text] = counts.get(text, 0) + count
    if total and doubles == total:
        counts = _without_first_number(counts)
    stacks = stacks_of(_tidied(counts))
    stacks.skipped = skipped
    return stacks


def stacks_of(counts: Mapping[str, float]) -> Stacks:
    """Stacks from their samples by folded text."""
    reader = Reader()
    stacks = Stacks(reader.table)
    for text, samples in counts.items():
        stacks.add(reader.stack(text), samples)
    return stacks


class Reader(dict[str, int]):
    """The numbers of frames by their folded text, each read once; ``table`` has the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FrameTable()

    def __missing__(self, text: str) -> int:
        self[text] = number = self.table.number(frame_of(text))
        return number

    def stack(self, text: str) -> Stack:
        return tuple(map(self.__getitem__, text.split(";")))


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


def _tidied(stacks: Mapping[str, float]) -> dict[str, float]:
    """Without stacks of no samples, and with frames joined that a semicolon has split."""
    counts: dict[str, float] = {}
    for stack, count in stacks.items():
        if count:
            # ``Ljava/io/File;::read``: no frame begins with two colons by itself.
            whole = _in_one_frame_each(stack.lstrip("\ufeff")).replace(";::", ":::")
            counts[whole] = counts.get(whole, 0) + count
    return counts


def _in_one_frame_each(stack: str) -> str:
    """A stack whose command lines, if it begins with any, are frames without semicolons."""
    found = _PROCESSES.match(stack) if stack.startswith("process ") else None
    if found is None:
        return stack
    lines = _COMMAND_LINE.sub(lambda line: line[1].replace(";", ":"), found[0])
    return lines + stack[found.end() :]


def frame_of(text: str) -> StackFrame:
    """What a frame of a folded stack is."""
    kind = _KINDS.get(text[-4:])
    name = text[:-4] if kind else text
    if kind in (None, KERNEL) and _is_bpf(name):
        return StackFrame(name, BPF, text)
    if kind:
        return StackFrame(name or "[unknown]", kind, text)
    if text.startswith("py::"):
        return _by_perf_map(text)
    if text.endswith(")"):
        return _by_location(text)
    return StackFrame(text or "[unknown]", USER if _is_known(text) else UNKNOWN, text)


def kernel_frame(name: str, is_bpf: bool = False) -> StackFrame:
    """A frame of the kernel; it may be BPF's by its name alone."""
    if is_bpf:
        return StackFrame(name, BPF, name + "_[b]")
    return StackFrame(name, BPF if _is_bpf(name) else KERNEL, name + "_[k]")


def _is_known(name: str) -> bool:
    return bool(name) and not name.startswith(_UNKNOWN_NAMES)


def _is_bpf(name: str) -> bool:
    """Whether only the kernel's BPF code can have this name."""
    if name.startswith(_TRAMPOLINE):
        return name[len(_TRAMPOLINE) :].rstrip("?").isdigit()
    return split_bpf_name(name.rstrip("?")) is not None


def _by_perf_map(text: str) -> StackFrame:
    """``py::function:/path/file.py``, as CPython writes for perf (Python/perf_trampoline.c)."""
    _, _, rest = text.partition("::")
    function, _, file = rest.rpartition(":")
    location = SourceLocation(file, 0) if function and file else None
    return StackFrame(function or rest, PYTHON, text, location)


def _by_location(text: str) -> StackFrame:
    """``function (file.py:12)``, as py-spy writes; any other parenthesis belongs to the name."""
    function, _, place = text[:-1].rpartition(" (")
    file, _, line = place.rpartition(":")
    file, line = (file, line) if line.isdigit() and len(line) <= _DIGITS else (place, "0")
    if function and (file.endswith(".py") or file.startswith("<")):
        return StackFrame(function, PYTHON, text, SourceLocation(file, int(line)))
    return StackFrame(text, USER if _is_known(text) else UNKNOWN, text)
