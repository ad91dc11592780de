"""Where in the source frames are, for the outputs that tell it."""

from __future__ import annotations

from ksym_plugin.timeline.location import Locator, Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.timeline.location import KernelLines, Lines
    from ksym_plugin.timeline.symbols import Frame

_LONGEST: Final = 255  # NAME_MAX


class Placer:
    """Finds the places of frames; ``kernel`` knows the lines of the core image, or is None."""

    def __init__(self, lines: Lines, kernel: KernelLines | None) -> None:
        self._locator = Locator(lines, kernel)
        self._kernel = kernel

    def of(self, frame: Frame, is_leaf: bool) -> Place:
        """The place of a frame that the history or a table of the kernel has named."""
        self._locator.locate((frame,), is_leaf)
        return Place(frame.lifetime, frame.file, frame.line, frame.text, frame.traced)

    def of_core(self, address: int, offset: int | None, is_leaf: bool) -> Place | None:
        """The place of a frame that perf has named in the core image."""
        if self._kernel is None:
            return None
        # As the Locator does: what is before the first byte is another function's.
        line = self._kernel.line(address if is_leaf or offset == 0 else address - 1)
        return None if line is None else Place(None, line.file, line.line, line.text or None)


def base(file: str) -> str:
    """A file's name without its folder, as perf shows it; without blanks, which end it.

    Any file can be named by who compiled it: in perf's text a line that has no blanks is
    neither a header nor a frame. What is longer than a file's name can be is cut, as it may
    stand in every sample.
    """
    name = file.rpartition("/")[2][:_LONGEST]
    if name.isprintable() and " " not in name:
        return name
    return "".join(c if c.isprintable() and c != " " else "_" for c in name)
