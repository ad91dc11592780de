"""The text of a kallsyms table, brought into one form that sorts by address.

Every line becomes ``<16 lower-case hex digits> <type> <name>[<TAB>[<module>]]``, so that
the byte order of the lines is the order of their addresses and a table needs no object
per symbol. What the kernel prints already has that form, but for the width on 32-bit
kernels: such text is checked and cut up a block at a time, by C code alone. Only a block
that is irregular (pasted, edited, upper-case, CRLF) is taken line by line.

ARM's and AArch64's mapping symbols (``$a``, ``$x.12``: they mark where code and literals
begin, and share addresses and types with functions) are dropped here, before anything
can mistake them for a name.
"""

from __future__ import annotations

import re

from ksym_plugin.timeline.errors import KallsymsError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

#: The kernel's largest tables are some 30 MB. What is larger is no kallsyms, and may
#: well have no end (a device, a pipe).
MAX_BYTES = 1 << 28

_BLOCK_BYTES = 1 << 17
_BOM = b"\xef\xbb\xbf"
_BPF_SUFFIX = b"\t[bpf]"
_PADDING = b"00000000"

# Both are used on text that begins with a newline and does not end with one.
_NOT_WIDE = re.compile(rb"\n(?![0-9a-f]{16} [!-~] [^\s])")
_NOT_NARROW = re.compile(rb"\n(?![0-9a-f]{8} [!-~] [^\s])")
_MAPPING_LINES = re.compile(rb"\n[0-9a-f]+ [!-~] \$[adtx](?:\.[^\s]*)?(?:\t[^\n]*)?(?![^\n])")
# A TAB that does not introduce the module's name at the end of its line.
_ODD_TAB = re.compile(rb"\t(?!\[[^\]\s]+\](?:\n|\Z))")
_MAPPING_NAME = re.compile(rb"\$[adtx](?:\.|\Z)")
_LINE = re.compile(
    rb"\s*(?:0[xX])?(0*[0-9a-fA-F]{1,16})\s+([!-~])\s+([^\s]+)(?:\s+\[([^\]\s]+)\])?\s*\Z"
)


class KallsymsText:
    """Collects the lines of one table.

    ``lines`` are in the file's order. ``bpf_tail`` is what follows the first ``[bpf]``
    line, in the file's order also after ``lines`` have been sorted. ``narrow`` says
    that addresses of 32 bits were seen; ``skipped`` counts lines that are no symbol.
    With ``strict`` such a line raises KallsymsError with its number instead.
    """

    __slots__ = ("_strict", "_strict_lines", "bpf_tail", "lines", "narrow", "skipped")

    def __init__(self, strict: bool = False) -> None:
        self.lines: list[bytes] = []
        self.bpf_tail: list[bytes] = []
        self.narrow = False
        self.skipped = 0
        self._strict = strict
        self._strict_lines = 0

    def add(self, block: bytes) -> None:
        """Take in some whole lines; the last may lack its newline."""
        if not self.lines and block.startswith(_BOM):
            block = block[len(_BOM) :]
        text = b"\n" + block[: -1 if block.endswith(b"\n") else None]
        lines = self._regular(text)
        if lines is None:
            lines = self._irregular(text[1:].split(b"\n"))
        if self.bpf_tail:
            self.bpf_tail += lines
        elif b"[" in text:
            self.bpf_tail = _from_bpf(lines)
        self.lines += lines

    def _regular(self, text: bytes) -> list[bytes] | None:
        """The lines of text as the kernel prints it, or None for any other text."""
        if self._strict or b"\r" in text:
            return None
        narrow = text[9:10] == b" "
        if (_NOT_NARROW if narrow else _NOT_WIDE).search(text):
            return None
        if b"\t" in text and _ODD_TAB.search(text):
            return None
        if b"$" in text:
            text = _MAPPING_LINES.sub(b"", text)
        if narrow:
            text = text.replace(b"\n", b"\n" + _PADDING)
        lines = text.split(b"\n")
        del lines[0]
        if text.count(b" ") != 2 * len(lines):
            return None
        self.narrow |= narrow
        return lines

    def _irregular(self, block: list[bytes]) -> list[bytes]:
        lines = []
        for number, line in enumerate(block, self._strict_lines + 1):
            match = _LINE.match(line)
            if match is None:
                self._reject(line, number)
            elif not _MAPPING_NAME.match(match[3]):
                lines.append(self._rewrite(match))
        # Counted here alone: strict reading comes by here with every line.
        self._strict_lines += len(block)
        return lines

    def _reject(self, line: bytes, number: int) -> None:
        if not line.strip():
            return
        self.skipped += 1
        if self._strict:
            shown = line[:60].decode("ascii", "backslashreplace")
            raise KallsymsError(
                f"line {number} of the kallsyms table is not a symbol: {shown!r}",
                "take a fresh copy of /proc/kallsyms, or read this one leniently",
            )

    def _rewrite(self, match: re.Match[bytes]) -> bytes:
        printed, kind, name, module = match.groups()
        address = printed.lstrip(b"0")
        # Zero says nothing: a wide table has it for what is relative to a CPU's area.
        if address and len(printed) <= 8:
            self.narrow = True
        suffix = b"\t[%b]" % module if module else b""
        return b"%b %b %b%b" % (address.lower().rjust(16, b"0"), kind, name, suffix)


def _from_bpf(lines: list[bytes]) -> list[bytes]:
    for index, line in enumerate(lines):
        if line.endswith(_BPF_SUFFIX):
            return lines[index:]
    return []


def read_text(file: IO[bytes], text: KallsymsText) -> None:
    """Read a whole table. Raises OSError, and KallsymsError if it has no end.

    Taken a block at a time: the whole text beside all its lines would double the
    memory that a load needs at its peak.
    """
    for total, block in enumerate(_blocks(file)):
        if total * _BLOCK_BYTES > MAX_BYTES:
            raise KallsymsError(
                f"the kallsyms table is larger than {MAX_BYTES >> 20} MB",
                "name a copy of /proc/kallsyms",
            )
        text.add(block)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while True:
        block = file.read(_BLOCK_BYTES)
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline(_BLOCK_BYTES)
        yield block


def read_module_sizes(path: str) -> dict[str, tuple[int, int]]:
    """Base address and bytes by module name; empty where unreadable, hidden or built in.

    A line of /proc/modules is: name, bytes, use count, users, state, address.
    """
    sizes: dict[str, tuple[int, int]] = {}
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                fields = line.split()
                if len(fields) >= 6:
                    sizes[fields[0]] = (int(fields[5], 16), int(fields[1]))
    except (OSError, ValueError):
        return {}
    return {name: extent for name, extent in sizes.items() if extent[0]}
