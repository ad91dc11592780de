"""Stacks as tuples of numbers, and the table of the frames that the numbers stand for.

``HotLines`` says at which source lines of each frame the samples were.
"""

from __future__ import annotations

from collections import defaultdict

from ksym_plugin.stacks.names import cut, decode_name, file_name
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from ksym_plugin.timeline.symbols import SourceLocation

    Event = TypeVar("Event", str, bytes)
    Key = TypeVar("Key")

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
#: What a sample counts for: one, or its period.
SAMPLES = "samples"
PERIOD = "period"
WEIGHTS = (SAMPLES, PERIOD)
#: How many of the events that are not counted are named.
_MOST_EVENTS = 10

#: How many lines of a frame are listed, and the columns of their locations and their text.
_MOST = 5
_WIDEST_LOCATION = 40
_WIDEST_TEXT = 60


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

    def __init__(self, table: FrameTable) -> None:
        self.table = table
        self.counts: defaultdict[Stack, float] = defaultdict(int)
        self.skipped = 0

    def add(self, stack: Stack, samples: float = 1) -> None:
        self.counts[stack] += samples

    def ordered(self) -> list[tuple[Stack, float]]:
        """The stacks and their samples, in the order of their folded text."""
        return sorted(self.counts.items(), key=lambda item: self.text(item[0]))

    def by_text(self) -> dict[str, float]:
        """Samples by folded text (``root;…;leaf``), in its order."""
        counts: defaultdict[str, float] = defaultdict(int)
        for stack, samples in self.ordered():
            counts[self.text(stack)] += samples
        return counts

    def text(self, stack: Stack) -> str:
        """A stack as folded text."""
        frames = self.table.frames
        return ";".join([frames[number].text for number in stack])


class HotLines:
    """Counts samples by frame and source location.

    A frame that was at several lines has one number for each, and one without a line.
    """

    def __init__(self, table: FrameTable) -> None:
        self._table = table
        #: By the number of a frame with a line: its number without, and the line.
        self._located: dict[int, tuple[int, SourceLocation]] = {}
        self._samples: defaultdict[int, float] = defaultdict(int)
        self._counts: defaultdict[int, defaultdict[SourceLocation, float]] = defaultdict(
            lambda: defaultdict(int)
        )

    def number(self, number: int, location: SourceLocation | None) -> int:
        """The number of a frame at a source location; the frame's own where there is none."""
        if location is None:
            return number
        frame = self._table.frames[number]
        located = self._table.number(StackFrame(frame.name, frame.kind, frame.text, location))
        self._located[located] = number, location
        return located

    def unlocated(self, stack: Stack) -> Stack:
        """A stack without the lines of its frames."""
        located = self._located
        if located.keys().isdisjoint(stack):
            return stack
        return tuple([located[number][0] if number in located else number for number in stack])

    def sum_up(self, stacks: Stacks) -> Stacks:
        """The stacks without the lines of their frames; those are counted.

        A sample counts once for a line of a frame, however often it is in its stack.
        """
        summed = Stacks(stacks.table)
        for stack, samples in stacks.counts.items():
            summed.add(self.unlocated(stack), samples)
            met = [self._located[number] for number in set(stack) if number in self._located]
            for number, location in met:
                self._counts[number][location] += samples
            for number in {number for number, _ in met}:
                self._samples[number] += samples
        return summed

    def frames(self) -> list[int]:
        """The frames that have lines."""
        return list(self._counts)

    def hottest(self) -> dict[int, SourceLocation]:
        """Where each frame was most often."""
        return {number: self._ranked(number)[0][0] for number in self._counts}

    def describe(self, number: int) -> list[str]:
        """A frame's hottest lines in words, each with its share of the frame's samples."""
        if number not in self._counts:
            return []
        ranked, whole = self._ranked(number), self._samples[number] or 1
        places = [f"{file_name(at.file)}:{at.line}" for at, _ in ranked[:_MOST]]
        wide = min(max(map(len, places)), _WIDEST_LOCATION)
        lines = [
            f"{place:<{wide}}  {100 * samples / whole:3.0f} %"
            f"  {cut(' '.join(location.text.split()), _WIDEST_TEXT)}".rstrip()
            for place, (location, samples) in zip(places, ranked)
        ]
        more = len(ranked) - _MOST
        return [*lines, f"and {more} more lines"] if more > 0 else lines

    def _ranked(self, number: int) -> list[tuple[SourceLocation, float]]:
        """A frame's locations, the hottest first; then as they stand in the source."""
        return sorted(
            self._counts[number].items(),
            key=lambda item: (-item[1], item[0].file, item[0].line),
        )


class Counts(dict["Event", "defaultdict[Key, int]"]):
    """How much of each event was counted for what; ``samples`` are those of each event.

    Different events are never added up: a picture is of one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[Event, int] = {}

    def __missing__(self, event: Event) -> defaultdict[Key, int]:
        self.samples[event] = 0
        counts: defaultdict[Key, int] = defaultdict(int)
        self[event] = counts
        return counts

    def count(self, event: Event, what: Key, weight: int) -> None:
        """Count a sample."""
        self[event][what] += weight
        self.samples[event] += 1

    def take_in(self, other: Counts[Event, Key]) -> None:
        """Add what was counted in another part of the same samples."""
        for event, counts in other.items():
            mine = self[event]
            for what, count in counts.items():
                mine[what] += count
            self.samples[event] += other.samples[event]

    def choose(self, name: Event | None) -> Event | None:
        """The event of that name, by default the one with the most samples; None without any.

        KsymError if there are samples, but none of that event.
        """
        if name is None or not self:
            return max(self.samples, key=self.samples.__getitem__, default=None)
        if name not in self:
            there = ", ".join(map(_text, self))
            raise KsymError(f"no sample is of the event {_text(name)}", f"take one of: {there}")
        return name

    def others(self, event: Event) -> str:
        """A sentence that tells the other events; empty if there are none."""
        ranked = sorted(self.samples.items(), key=lambda item: (-item[1], item[0]))
        others = [_counted(*item) for item in ranked if item[0] != event]
        if not others:
            return ""
        if len(others) > _MOST_EVENTS:
            others[_MOST_EVENTS:] = [f"{len(others) - _MOST_EVENTS} more"]
        counted = _counted(event, self.samples[event])
        return f"only {counted} is counted; --event takes another: {', '.join(others)}"


def _counted(event: str | bytes, samples: int) -> str:
    return f"{_text(event)} ({samples:,} sample{'s' * (samples != 1)})"


def _text(event: str | bytes) -> str:
    return event if isinstance(event, str) else decode_name(event)
