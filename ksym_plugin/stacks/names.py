"""Names as they are shown, each way of showing with its own rule.

Names are other people's, and may hold anything: whoever loads a program or starts a task
names it. Bytes that are not UTF-8 are kept as surrogates.
"""

from __future__ import annotations

_LONGEST = 500
_LONGEST_FILE = 255  # NAME_MAX

#: What moves a terminal's cursor or ends a line: C0, DEL and C1, the latter also as bytes.
_CONTROLS = (*range(0x20), 0x7F, *range(0x80, 0xA0), *range(0xDC80, 0xDCA0))
_FOR_TERMINAL = {code: None for code in _CONTROLS if code != ord("\t")}
_FOR_STACKS = {**dict.fromkeys((*_CONTROLS, 0x2028, 0x2029), " "), ord(";"): ":"}
#: The same for text that stays bytes: of it, C0 alone can end a line for any reader.
_BYTES_FOR_STACKS = bytes.maketrans(bytes(range(0x20)) + b";", b" " * 0x20 + b":")
_FOR_PERF_TEXT = dict.fromkeys((*range(0x20), 0x7F), " ")


def decode_name(name: bytes) -> str:
    """A name that perf printed."""
    return name.decode("utf-8", "surrogateescape")


def encode_name(name: str) -> bytes:
    """``name`` as perf script's text has it; a line can hold nothing that would end it."""
    name = name.translate(_FOR_PERF_TEXT)
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair: no bytes can have been decoded to it
        return name.encode("utf-8", "backslashreplace")


def strip_nul(name: str) -> str:
    """perf's name without what it appends: a NUL and ``[bpf]`` where kcore shadows its map."""
    return name.partition("\0")[0]


def printable(text: str) -> str:
    """``text`` on one line, of what prints alone: no terminal obeys it."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def for_terminal(text: str) -> str:
    """``text`` without control characters."""
    return text.translate(_FOR_TERMINAL)


def for_stacks(name: str) -> str:
    """``name`` without what separates the frames and the lines of folded stacks."""
    return name.translate(_FOR_STACKS)


def bytes_for_stacks(name: bytes) -> bytes:
    """The same for a name in bytes, as perf printed it."""
    return name.translate(_BYTES_FOR_STACKS)


def readable(text: str) -> str:
    """``text`` with escapes for characters that do not print, and cut if it is long.

    It is valid in XML 1.0, which forbids no character that prints.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code == 0xA0:
        return " "
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def cut(name: str, room: int) -> str:
    """As much of a name as fits into ``room`` columns; nothing if there is hardly any room."""
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


def for_xml(text: str) -> str:
    """``text`` for the inside of an XML element."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def file_name(path: str) -> str:
    """A file's name without its folder, as perf shows it; without blanks, which end it.

    Whoever compiles a program names its files. In perf's text a line without blanks is neither
    a header nor a frame. A name longer than a file's can be is cut: it may stand in every
    sample.
    """
    name = path.rpartition("/")[2][:_LONGEST_FILE]
    if name.isprintable() and " " not in name:
        return name
    return "".join(c if c.isprintable() and c != " " else "_" for c in name)
