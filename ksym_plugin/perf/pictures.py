"""What the handler draws: samples as a flame graph, or for speedscope.

BPF frames are a class of their own in both, and what the history knows of a program goes
with its frames: who it was, and which of its source lines they were at.
"""

from __future__ import annotations

from ksym_plugin.perf.hot_lines import HotLines, unmarked
from ksym_plugin.perf.naming import is_bpf_name
from ksym_plugin.perf.output import FoldedOutput
from ksym_plugin.stacks import speedscope, svg
from ksym_plugin.stacks.lifetimes import told
from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, TextIO

    from ksym_plugin.timeline.location import Place
    from ksym_plugin.timeline.symbols import Lifetime

#: How many programs of one name a tooltip tells of.
_MOST_TOLD: Final = 4


class SvgOutput(FoldedOutput):
    """A flame graph; ``title`` stands above it."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream)
        self._title = title
        self._programs: dict[str, dict[Lifetime, None]] = {}
        self._traced: dict[str, str] = {}
        self._lines = HotLines()

    def kernel(
        self,
        address: int,
        name: str,
        offset: int | None,
        dso: str,
        place: Place | None = None,
    ) -> str:
        """A frame; what is BPF's ends in ``_[b]``."""
        if dso != BPF_MODULE and not (name and is_bpf_name(name, dso)):
            piece = super().kernel(address, name, offset, dso)
        else:
            piece = (self._names[name] if name else self._files[dso]) + "_[b]"
            if place is not None and place.lifetime is not None:
                self._programs.setdefault(piece, {})[place.lifetime] = None
        if place is None:
            return piece
        if place.traced is not None:
            self._traced[piece] = place.traced
        return self._lines.marked(piece, place)

    def _print(self) -> None:
        picture = svg.Picture(self._title)
        counts = self._lines.sum_up(self._stacks)
        noted = {*self._programs, *self._traced, *self._lines.pieces()}
        for part in svg.draw(counts, picture, {piece: self._notes(piece) for piece in noted}):
            self._stream.write(part)

    def _notes(self, piece: str) -> list[str]:
        """What a frame's tooltip says beside its samples."""
        lifetimes = self._programs.get(piece, {})
        lines = [told(lifetime) for lifetime in lifetimes]
        more = len(lines) - _MOST_TOLD
        if more > 0:
            lines[_MOST_TOLD:] = [f"and {more} more of this name"]
        if piece in self._traced:
            lines.append(f"traces {self._traced[piece]}")
        return lines + self._lines.told(piece)


class SpeedscopeOutput(SvgOutput):
    """A profile a thread, its samples in the order of time; before them all, merged."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream, title)
        self._threads: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self._stack: dict[str, str] = {}
        self._kept: dict[str, str] = {}

    def _add(self, event: dict[str, Any], stack: str) -> None:
        super()._add(event, stack)
        stack = self._stack.get(stack) or self._plain(stack)
        thread = (str(event.get("comm") or ""), int(event["sample"].get("tid", -1)))
        samples = self._threads.setdefault(thread, [])
        if samples and samples[-1][0] is stack:
            samples[-1] = (stack, samples[-1][1] + 1)
        else:
            samples.append((stack, 1))

    def _plain(self, stack: str) -> str:
        """A stack without the places of its frames; kept once, however often it comes."""
        plain = unmarked(stack)
        plain = self._stack[stack] = self._kept.setdefault(plain, plain)
        return plain

    def _print(self) -> None:
        merged: Any = ("all threads, merged", sorted(self._lines.sum_up(self._stacks).items()))
        threads = [
            (f"{comm} {tid}", samples) for (comm, tid), samples in sorted(self._threads.items())
        ]
        profiles = [merged, *threads]
        for part in speedscope.write(self._title, profiles, self._lines.hottest()):
            self._stream.write(part)
