"""Whole lines out of a stream of bytes, held back no more than must be."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: A longer line is no frame and no header: it is passed on before its end has come.
LONGEST: Final = 1 << 20


class Cutter:
    """Whole lines of a text that comes in pieces of any size."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._size = 0
        self._is_endless = False

    def cut(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        """The end of a line that is too long for a frame or header, whole lines, and the
        beginning of another such line; what else has begun is held back."""
        before = after = whole = b""
        if self._is_endless:
            end = data.find(b"\n") + 1
            if not end:
                return data, b"", b""
            self._is_endless = False
            before, data = data[:end], data[end:]
        end = data.rfind(b"\n") + 1
        if end:
            whole = b"".join((*self._begun, data[:end]))
            self._begun, self._size = [], 0
        if end < len(data):
            self._begun.append(data[end:])
            self._size += len(data) - end
        if self._size > LONGEST:
            self._is_endless = True
            after = self.rest()
        return before, whole, after

    def rest(self) -> bytes:
        """What is held back, and no longer."""
        rest = b"".join(self._begun)
        self._begun, self._size = [], 0
        return rest
