"""Which source lines the frames of a picture were at, and how often.

A frame that has a line carries the number of its place behind a mark that no name can
hold, so while samples come in nothing is done for it. Stacks are counted by it, and when
they are printed the marks go and the lines are summed up.
"""

from __future__ import annotations

from ksym_plugin.perf.placing import base
from ksym_plugin.stacks.names import cut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

    from ksym_plugin.timeline.location import Place

#: Outputs of folded stacks replace it in names, as all control characters.
_MARK: Final = "\x1f"
#: How many lines of a frame are told, how wide their places are, and how much of each text.
_MOST: Final = 5
_WHERE: Final = 40
_TEXT: Final = 60


class HotLines:
    """The lines of frames, by the text of the frame without its mark."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._numbers: dict[tuple[str | None, int | None, str | None], int] = {}
        self._samples: dict[str, float] = {}
        self._counts: dict[str, dict[int, float]] = {}

    def marked(self, piece: str, place: Place) -> str:
        """A frame with its place, if that has a line."""
        if place.file is None:
            return piece
        key = (place.file, place.line, place.text)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._places)
            self._places.append(place)
        return f"{piece}{_MARK}{number}"

    def sum_up(self, stacks: Mapping[str, float]) -> dict[str, float]:
        """The stacks without marks, their lines counted.

        A sample counts once for a line of a frame, however often it is in its stack.
        """
        plain: dict[str, float] = {}
        for stack, samples in stacks.items():
            whole = stack
            if _MARK in stack:
                self._count(stack, samples)
                whole = unmarked(stack)
            plain[whole] = plain.get(whole, 0) + samples
        return plain

    def pieces(self) -> list[str]:
        """The frames that have lines."""
        return list(self._counts)

    def hottest(self) -> dict[str, tuple[str, int]]:
        """The file and the line at which each frame was most often."""
        found = {}
        for piece in self._counts:
            place = self._places[self._ranked(piece)[0][0]]
            found[piece] = (place.file or "", place.line or 0)
        return found

    def told(self, piece: str) -> list[str]:
        """A frame's hottest lines in words, each with its share of the frame's samples."""
        if piece not in self._counts:
            return []
        ranked = self._ranked(piece)
        whole = self._samples[piece]
        wide = min(max(len(self._where(number)) for number, _ in ranked[:_MOST]), _WHERE)
        lines = [
            f"{self._where(number):<{wide}}  {100 * samples / whole:3.0f} %"
            f"  {self._text(number)}".rstrip()
            for number, samples in ranked[:_MOST]
        ]
        more = len(ranked) - _MOST
        return lines + ([f"and {more} more lines"] if more > 0 else [])

    def _count(self, stack: str, samples: float) -> None:
        met = set(stack.split(";"))
        names = set()
        for frame in met:
            piece, mark, number = frame.partition(_MARK)
            if not mark:
                continue
            names.add(piece)
            counts = self._counts.setdefault(piece, {})
            counts[int(number)] = counts.get(int(number), 0) + samples
        for piece in names:
            self._samples[piece] = self._samples.get(piece, 0) + samples

    def _ranked(self, piece: str) -> list[tuple[int, float]]:
        """A frame's places, the hottest first; then as they stand in the source."""
        places = self._places
        return sorted(
            self._counts[piece].items(),
            key=lambda item: (-item[1], places[item[0]].file or "", places[item[0]].line or 0),
        )

    def _where(self, number: int) -> str:
        place = self._places[number]
        return f"{base(place.file or '')}:{place.line}"

    def _text(self, number: int) -> str:
        return cut(" ".join((self._places[number].text or "").split()), _TEXT)


def unmarked(stack: str) -> str:
    """A stack without the numbers of places."""
    return ";".join([frame.partition(_MARK)[0] for frame in stack.split(";")])
