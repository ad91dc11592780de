"""What became of the kernel frames of a text."""

from __future__ import annotations

from ksym_plugin.perf.naming import Tally
from ksym_plugin.timeline.symbols import Reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: Why a frame keeps its name or has none, of perf script text alone.
COARSE: Final = Reason("two symbols followed each other here within what perf prints of the time")


class TextTally(Tally):
    """The tally of a text: also what could not be read, and what times were too coarse for."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = 0
        self.unparsed = 0

    @property
    def frames(self) -> int:
        return super().frames + self.coarse

    def lines(self) -> list[str]:
        lines = super().lines()
        if self.coarse:
            lines.append(f"{self.coarse:,} are as perf had them: {COARSE.text}")
        if self.unparsed:
            lines.append(f"{self.unparsed:,} lines are neither header nor frame; left as they are")
        return lines

    def add(self, other: TextTally) -> None:
        """Take in the tally of another part of the same text."""
        for count, value in vars(other).items():
            if isinstance(value, dict):
                mine = getattr(self, count)
                for what, number in value.items():
                    mine[what] = mine.get(what, 0) + number
            else:
                setattr(self, count, getattr(self, count) + value)
