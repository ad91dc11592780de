"""Lines of a text as they are spelled in folded stacks, each spelled once."""

from __future__ import annotations

import re

from ksym_plugin.perf import text
from ksym_plugin.perf.text import UNKNOWN
from ksym_plugin.stacks.inline import Inliner
from ksym_plugin.stacks.spelling import Style, spelled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: A frame as perf aligns it: the parts besides its address and offset, if it has one.
_FUNCTION: Final = re.compile(
    rb"\t *[0-9a-f]+(?<=\t.{16}) (?:(.*\S)\+0x[0-9a-f]+( \(.*\))|(.*\)))", re.DOTALL
)
#: What is kept of lines: how many, and how long at the most.
_MOST: Final = 1 << 17
_KEPT: Final = 1 << 10


class Options:
    """How to fold; by default as stackcollapse-perf.pl does.

    ``event`` is the only one counted, None for the first that comes. ``srcline`` says that
    a line with the source follows each frame (perf script -F +srcline). ``inline`` asks
    addr2line what was inlined, with ``context`` also for source lines.
    """

    __slots__ = ("context", "event", "inline", "pid", "srcline", "style", "tid")

    def __init__(
        self,
        style: Style | None = None,
        pid: bool = False,
        tid: bool = False,
        event: bytes | None = None,
        srcline: bool = False,
        inline: bool = False,
        context: bool = False,
    ) -> None:
        self.style = style or Style()
        self.pid = pid
        self.tid = tid
        self.event = event
        self.srcline = srcline
        self.inline = inline
        self.context = context


class Pieces(dict[bytes, "bytes | None"]):
    """How a line within a sample is spelled; None for all that has to be looked at.

    A function is sampled at many addresses. Those of its lines differ in two numbers that
    the spelling lacks, so it is also kept by what is left without them.
    """

    def __init__(self, options: Options, is_java: bool) -> None:
        super().__init__()
        self._style = options.style
        self._is_java = is_java
        self._inliner = Inliner(options.context) if options.inline else None
        #: By function, for the lower half of the address space and the upper.
        self._functions: tuple[dict[bytes, bytes], dict[bytes, bytes]] = ({}, {})

    def __missing__(self, line: bytes) -> bytes | None:
        found = _FUNCTION.fullmatch(line)
        # 16 digits of which the first is 8 or above.
        functions = self._functions[line[1:2] > b"7"]
        key = b""
        if found is not None and not self._depends_on_address(line):
            key = found[3] or found[1] + b"+0x" + found[2]
        piece = functions.get(key)
        if piece is None:
            frame = text.parse(line, False)
            if not isinstance(frame, text.FrameLine):
                return None
            piece = self._spelled(frame)
            if not piece:
                return None
            # Not if the number belongs to something else, which is the grammar's to say.
            if found is not None and key and (found[3] or frame.name == found[1].lstrip()):
                if len(functions) >= _MOST:
                    functions.clear()
                functions[key] = piece
        if len(line) <= _KEPT:
            if len(self) >= _MOST:
                self.clear()
            self[line] = piece
        return piece

    def _depends_on_address(self, line: bytes) -> bool:
        return self._inliner is not None or (self._style.addrs and UNKNOWN in line)

    def _spelled(self, frame: text.FrameLine) -> bytes:
        piece = self._inliner.expand(frame) if self._inliner is not None else b""
        return piece or spelled(frame, self._style, self._is_java)
