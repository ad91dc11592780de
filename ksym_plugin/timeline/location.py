"""From frames to source locations.

A frame's address is where execution goes on: of the leaf the instruction itself, of a
caller the one after the call, which can be another line's. So a caller's line is that of
the byte before.
"""

from __future__ import annotations

from ksym_plugin.timeline.symbols import BPF_PROG, BPF_TRAMPOLINE, KERNEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from ksym_plugin.timeline.symbols import Frame, Lifetime, SourceLocation

    class Lines(Protocol):
        """The source lines of programs, and what trampolines trace."""

        def line(self, lifetime: Lifetime, offset: int, /) -> SourceLocation | None: ...
        def traced(self, lifetime: Lifetime, /) -> str | None: ...

    class KernelLines(Protocol):
        """The source lines of the kernel image, by addresses in memory."""

        def line(self, address: int, /) -> SourceLocation | None: ...


class Locator:
    """Finds the source locations of frames; ``image`` is None where the kernel's are not known."""

    def __init__(self, lines: Lines, image: KernelLines | None = None) -> None:
        self._lines = lines
        self._image = image

    def locate(self, frame: Frame, is_leaf: bool) -> Frame:
        """The frame with its source location, or what it traces where it is a trampoline."""
        lifetime = frame.lifetime
        if frame.kind == BPF_TRAMPOLINE and lifetime is not None:
            return frame.tracing(self._lines.traced(lifetime))
        if frame.kind == BPF_PROG and lifetime is not None:
            # What is before the first byte is another function's.
            offset = frame.offset if is_leaf else max(frame.offset - 1, 0)
            return frame.at(self._lines.line(lifetime, offset))
        if frame.kind == KERNEL:
            return frame.at(self.in_image(frame.address, frame.offset, is_leaf))
        return frame

    def in_image(self, address: int, offset: int | None, is_leaf: bool) -> SourceLocation | None:
        """The source location of a frame of the kernel image, ``offset`` into its function."""
        if self._image is None:
            return None
        return self._image.line(address if is_leaf or offset == 0 else address - 1)
