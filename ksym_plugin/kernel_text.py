"""Where this boot's kernel image begins, without reading all of kallsyms."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_TEXT: Final = b"_text"
_STEXT: Final = b"_stext"
#: The image's beginning comes early, after per-CPU symbols at the most.
_MOST_BYTES: Final = 4 << 20


def start(path: str = "/proc/kallsyms") -> int | None:
    """The address of ``_text``, else of ``_stext``; None where it is hidden or not told.

    The same answer as ``Kallsyms.text_start``, at a hundredth of the cost.
    """
    stext = 0
    try:
        with open(path, "rb") as file:
            left = _MOST_BYTES
            for line in file:
                left -= len(line)
                fields = line.split()
                if left < 0 or len(fields) < 3:
                    break
                address = int(fields[0], 16)
                if fields[2] == _TEXT:
                    return address or None
                if fields[2] == _STEXT:
                    stext = address
                elif stext and address > stext:
                    # kallsyms lists the image by address, and _text comes no later.
                    break
    except (OSError, ValueError):
        return None
    return stext or None
