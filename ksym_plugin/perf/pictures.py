"""What the handler draws: samples as a flame graph, or for speedscope.

BPF frames are a class of their own in both, and what the history knows of a program goes
with its frames.
"""

from __future__ import annotations

from ksym_plugin.perf.naming import is_bpf_name
from ksym_plugin.perf.output import FoldedOutput
from ksym_plugin.stacks import speedscope, svg
from ksym_plugin.stacks.lifetimes import told
from ksym_plugin.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final, TextIO

    from ksym_plugin.symbols import Lifetime

#: How many programs of one name a tooltip tells of.
_MOST_TOLD: Final = 4


class SvgOutput(FoldedOutput):
    """A flame graph; ``title`` stands above it."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream)
        self._title = title
        self._programs: dict[str, dict[Lifetime, None]] = {}

    def kernel(
        self,
        address: int,
        name: str,
        offset: int | None,
        dso: str,
        lifetime: Lifetime | None = None,
    ) -> str:
        """A frame; what is BPF's ends in ``_[b]``."""
        if dso != BPF_MODULE and not (name and is_bpf_name(name, dso)):
            return super().kernel(address, name, offset, dso)
        piece = (self._names[name] if name else self._files[dso]) + "_[b]"
        if lifetime is not None:
            self._programs.setdefault(piece, {})[lifetime] = None
        return piece

    def _print(self) -> None:
        picture = svg.Picture(self._title)
        for part in svg.draw(self._stacks, picture, dict(self._notes())):
            self._stream.write(part)

    def _notes(self) -> Iterator[tuple[str, list[str]]]:
        for piece, lifetimes in self._programs.items():
            lines = [told(lifetime) for lifetime in lifetimes]
            more = len(lines) - _MOST_TOLD
            yield (
                piece,
                lines[:_MOST_TOLD] + ([f"and {more} more of this name"] if more > 0 else []),
            )


class SpeedscopeOutput(SvgOutput):
    """A profile a thread, its samples in the order of time; before them all, merged."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream, title)
        self._threads: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self._stack: dict[str, str] = {}

    def _add(self, event: dict[str, Any], stack: str) -> None:
        stack = self._stack.setdefault(stack, stack)  # kept once, however often it comes
        super()._add(event, stack)
        thread = (str(event.get("comm") or ""), int(event["sample"].get("tid", -1)))
        samples = self._threads.setdefault(thread, [])
        if samples and samples[-1][0] is stack:
            samples[-1] = (stack, samples[-1][1] + 1)
        else:
            samples.append((stack, 1))

    def _print(self) -> None:
        merged: Any = ("all threads, merged", sorted(self._stacks.items()))
        threads = [
            (f"{comm} {tid}", samples) for (comm, tid), samples in sorted(self._threads.items())
        ]
        for part in speedscope.write(self._title, [merged, *threads]):
            self._stream.write(part)
