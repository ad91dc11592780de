"""Names as they can be shown: nothing in them is obeyed, nothing is endless.

Symbols, files and tasks are named by whoever wrote, compiled or started them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_LONGEST: Final = 500


def readable(text: str) -> str:
    """``text`` as one can read it: what has no look is escaped, what is endless is cut.

    What is left is valid in XML 1.0: the characters it forbids are none that print.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code == 0xA0:
        return " "
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def cut(name: str, room: int) -> str:
    """The beginning of a name that fits into so many columns; nothing if that says nothing."""
    if room < 3:
        return ""
    if name.isascii():
        return name if len(name) <= room else f"{name[: room - 1]}…"
    import unicodedata

    used = 0
    for at, character in enumerate(name):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > room:
            return f"{name[: max(0, at - 1)]}…"
    return name


def escaped(text: str) -> str:
    """``text`` for the inside of an XML element."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
