"""Stacks as tuples of numbers, and the table of the frames that the numbers stand for."""

from __future__ import annotations

from ksym_plugin.timeline.symbols import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.symbols import SourceLocation

    #: The numbers of the frames, root first.
    Stack = tuple[int, ...]

#: The kinds of code.
BPF = "bpf"
KERNEL = "kernel"
PYTHON = "python"
JIT = "jit"
INLINED = "inlined"
USER = "user"
UNKNOWN = "unknown"


class StackFrame(Record):
    """A frame of a stack: its name, what kind of code it is, its source where that is known.

    ``text`` is how folded stacks write it; it is what frames are ordered by.
    """

    __slots__ = ()
    name: str
    kind: str
    text: str
    location: SourceLocation | None

    def __new__(
        cls, name: str, kind: str, text: str, location: SourceLocation | None = None
    ) -> StackFrame:
        return tuple.__new__(cls, (name, kind, text, location))


class FrameTable:
    """Frames by number. Equal frames have one number."""

    __slots__ = ("_numbers", "frames")

    def __init__(self) -> None:
        self.frames: list[StackFrame] = []
        self._numbers: dict[StackFrame, int] = {}

    def number(self, frame: StackFrame) -> int:
        """The number of a frame, a new one if it has none."""
        number = self._numbers.setdefault(frame, len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        return number


class Stacks:
    """How many samples each stack has.

    ``skipped`` lines of the text that they were read from held none.
    """

    __slots__ = ("counts", "skipped", "table")

    def __init__(self, table: FrameTable) -> None:
        self.table = table
        self.counts: dict[Stack, float] = {}
        self.skipped = 0

    def add(self, stack: Stack, samples: float = 1) -> None:
        self.counts[stack] = self.counts.get(stack, 0) + samples

    def ordered(self) -> list[tuple[Stack, float]]:
        """The stacks and their samples, in the order of their folded text."""
        return sorted(self.counts.items(), key=lambda item: self.text(item[0]))

    def by_text(self) -> dict[str, float]:
        """Samples by folded text (``root;…;leaf``), in its order."""
        counts: dict[str, float] = {}
        for stack, samples in self.ordered():
            text = self.text(stack)
            counts[text] = counts.get(text, 0) + samples
        return counts

    def text(self, stack: Stack) -> str:
        """A stack as folded text."""
        frames = self.table.frames
        return ";".join([frames[number].text for number in stack])
