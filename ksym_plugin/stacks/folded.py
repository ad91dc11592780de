"""Folded stacks: ``root;…;leaf count``, one line a stack, and what a frame in one is.

The text is other people's: lines that hold no stack are counted and left out. The end of a
frame tells its kind, as FlameGraph's tools write it: ``_[k]`` kernel, ``_[j]`` compiled at
run time, ``_[i]`` inlined, and here also ``_[b]`` for BPF. The names that the kernel gives
to BPF programs tell it without that.
"""

from __future__ import annotations

import re
from collections import defaultdict

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
#: A stack and a number, which may have decimals.
_SAMPLE = re.compile(rb"(.*\S)\s+(\d+(?:\.\d*)?)\s*", re.DOTALL)
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
    counts: defaultdict[bytes, float] = defaultdict(int)
    #: The same if it is a difference, as long as it can be one.
    seconds: defaultdict[bytes, float] = defaultdict(int)
    skipped, is_difference = 0, True
    for line in lines:
        sample = _sample(line)
        if sample is None:
            skipped += bool(line.strip())
            continue
        stack, count = sample
        counts[stack] += count
        first = _sample(stack) if is_difference else None
        if first is not None:
            seconds[first[0]] += count
        is_difference = first is not None
    stacks = stacks_of(_tidied(seconds if is_difference else counts))
    stacks.skipped = skipped
    return stacks


def _sample(line: bytes) -> tuple[bytes, float] | None:
    """A stack and its samples; None where a line holds none."""
    found = _SAMPLE.fullmatch(line)
    if found is None or len(found[2]) > _DIGITS:
        return None
    return found[1], float(found[2]) if b"." in found[2] else int(found[2])


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


def _tidied(samples: Mapping[bytes, float]) -> dict[str, float]:
    """Without stacks of no samples, and with frames joined that a semicolon has split."""
    counts: defaultdict[str, float] = defaultdict(int)
    for stack, count in samples.items():
        if count:
            text = stack.decode("utf-8", "surrogateescape").lstrip("\ufeff")
            # ``Ljava/io/File;::read``: no frame begins with two colons by itself.
            counts[_in_one_frame_each(text).replace(";::", ":::")] += count
    return counts


def _in_one_frame_each(stack: str) -> str:
    """A stack whose command lines, if it begins with any, are frames without semicolons."""
    found = _PROCESSES.match(stack)
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
