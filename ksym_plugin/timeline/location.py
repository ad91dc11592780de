"""From frames to source lines.

A frame's address is where execution goes on: of the leaf the instruction itself, of a
caller the one after the call, which can be another line's. So a caller's line is that of
the byte before.
"""

from __future__ import annotations

from ksym_plugin.timeline.symbols import BPF_PROG, BPF_TRAMPOLINE, KERNEL, Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from ksym_plugin.timeline.packed import Line
    from ksym_plugin.timeline.symbols import Lifetime, Reason

    class Lines(Protocol):
        """The source lines of programs, and what trampolines trace."""

        def line(self, lifetime: Lifetime, offset: int, /) -> Line | None: ...
        def traced(self, lifetime: Lifetime, /) -> str | None: ...

    class KernelLines(Protocol):
        """The source lines of the kernel image, by addresses in memory."""

        def line(self, address: int, /) -> Line | None: ...


class Place:
    """What is known of a frame beside its name; what is not is None.

    ``lifetime`` is that of a symbol which comes and goes. ``file``, ``line`` and ``text``
    are of the instruction, or of the call where the frame is a caller's. ``traced`` is the
    function that a trampoline belongs to.
    """

    __slots__ = ("file", "lifetime", "line", "text", "traced")

    def __init__(
        self,
        lifetime: Lifetime | None = None,
        file: str | None = None,
        line: int | None = None,
        text: str | None = None,
        traced: str | None = None,
    ) -> None:
        self.lifetime = lifetime
        self.file = file
        self.line = line
        self.text = text
        self.traced = traced


class Locator:
    """Adds lines to the frames that a Resolver has made.

    ``image`` knows the lines of the kernel image, or is None.
    """

    def __init__(self, lines: Lines, image: KernelLines | None = None) -> None:
        self._lines = lines
        self._image = image

    def locate(self, frames: Sequence[Frame | Reason], first_is_leaf: bool = True) -> None:
        """Fill in ``file``, ``line``, ``text`` and ``traced`` of a callchain, leaf first."""
        for depth, frame in enumerate(frames):
            if not isinstance(frame, Frame):
                continue
            if frame.kind == BPF_TRAMPOLINE:
                lifetime = frame.lifetime
                frame.traced = None if lifetime is None else self._lines.traced(lifetime)
            elif frame.kind in (BPF_PROG, KERNEL):
                back = 0 if first_is_leaf and depth == 0 else 1
                self._fill(frame, max(frame.offset - back, 0))

    def _fill(self, frame: Frame, offset: int) -> None:
        found = None
        if frame.kind == BPF_PROG:
            lifetime = frame.lifetime
            found = None if lifetime is None else self._lines.line(lifetime, offset)
        elif self._image is not None:
            found = self._image.line(frame.address - frame.offset + offset)
        # Frames of static tables are shared: a leaf here may have been a caller before.
        frame.file = frame.line = frame.text = None
        if found is not None:
            frame.file, frame.line, frame.text = found.file, found.line, found.text or None
