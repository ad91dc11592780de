"""Numbers as DWARF packs them (LEB128, section 7.6)."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_MOST_BITS: Final = 128


def unsigned(code: bytes, at: int) -> tuple[int, int]:
    """A ULEB128, and where what follows it is; ValueError for one that is absurdly long."""
    byte = code[at]
    at += 1
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        if shift > _MOST_BITS:
            raise ValueError(shift)
        byte = code[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at


def signed(code: bytes, at: int) -> tuple[int, int]:
    """An SLEB128, and where what follows it is."""
    value, after = unsigned(code, at)
    if code[after - 1] & 0x40:
        value -= 1 << 7 * (after - at)
    return value, after
