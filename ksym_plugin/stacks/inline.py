"""Functions that a compiler has inlined, found again by binutils' addr2line.

Asked for by ``ksym fold --inline`` only: it starts a program for every distinct address.
A file is read as it is now, which need not be as it was when it was sampled.
"""

from __future__ import annotations

import os
import re
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.perf.text import FrameLine

#: What has no file that addr2line could read.
_NO_FILE: Final = re.compile(rb"perf-\d+.map|kernel\.|\[[^\]]+\]")
#: A line of nm; one without an address is of another file.
_SYMBOL: Final = re.compile(rb"([0-9a-f]+) \S (.*)")
_DISCRIMINATOR: Final = re.compile(rb" \(discriminator \S+\)")
_NOTHING: Final = (b"", b"??", b"??:??:0")
#: It reads whole debug information; some programs have gigabytes of it.
_SECONDS: Final = 120


class Inliner:
    """``expand`` a frame; with ``context`` each function has its source line behind it."""

    def __init__(self, context: bool = False) -> None:
        self._context = context
        self._symbols: dict[bytes, dict[bytes, int]] = {}

    def expand(self, frame: FrameLine) -> bytes:
        """The functions at a frame's address, outermost first; empty if nobody knows."""
        file = frame.dso or b""
        if _NO_FILE.search(file) or not os.path.isfile(file):
            return b""
        answer = _ask("addr2line", "-a", b"0x" + frame.digits, "-e", file, "-i", "-f", "-s", "-C")
        if b"??\n??:0" in answer and frame.offset:
            # The address is the process's, not the file's: go by the symbol.
            start = self._table(file).get(frame.name)
            if start is not None:
                place = b"%#x" % (start + int(frame.offset, 16))
                answer = _ask("addr2line", "-a", place, "-e", file, "-i", "-f", "-s", "-C")
        joined = b";".join(reversed(self._functions(answer)))
        return b"" if joined in _NOTHING else joined

    def _functions(self, answer: bytes) -> list[bytes]:
        """Function and place take turns, behind the address; the innermost comes first."""
        lines = [_DISCRIMINATOR.sub(b"", line) for line in answer.splitlines()[1:]]
        lines = [line.replace(b";", b":") for line in lines]
        if not self._context:
            return lines[::2]
        return [b"%s:%s" % pair for pair in zip(lines[::2], lines[1::2])]

    def _table(self, file: bytes) -> dict[bytes, int]:
        table = self._symbols.get(file)
        if table is None:
            table = self._symbols[file] = {}
            for line in _ask("nm", "--", file).splitlines():
                found = _SYMBOL.fullmatch(line)
                if found is not None:
                    table.setdefault(found[2], int(found[1], 16))
        return table


def _ask(*words: str | bytes) -> bytes:
    """What a program prints; nothing if it cannot."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return b""
    return done.stdout
