"""What is needed of BTF, the kernel's type information.

The full name of a BPF function is only there and in kallsyms: bpf_prog_info cuts it
after 15 characters and has none for subprograms. And the kernel's own BTF says how its
structures are laid out. The format is that of Documentation/bpf/btf.rst; whatever does
not follow it yields nothing, never an error.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Final

_MAGIC: Final = 0xEB9F
_HEADER: Final = struct.Struct("=HBBIIIII")
_TYPE: Final = struct.Struct("=III")
_MEMBER: Final = struct.Struct("=III")
_STRUCT: Final = 4
_FUNC: Final = 12
#: kind: bytes after the type itself, and for each of its ``vlen`` members.
_FIXED: Final = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH: Final = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_LAST_KIND: Final = 19


def function_names(blob: bytes, type_ids: Collection[int]) -> dict[int, str]:
    """The names of those of ``type_ids`` that are functions, by type id."""
    types, strings = sections(blob)
    wanted = set(type_ids)
    names: dict[int, str] = {}
    at = 0
    type_id = 1
    while len(names) < len(wanted) and at + _TYPE.size <= len(types):
        name_off, info, _ = _TYPE.unpack_from(types, at)
        kind = info >> 24 & 0x1F
        if kind > _LAST_KIND:
            # Of unknown length, so nothing after it can be found either.
            break
        if kind == _FUNC and type_id in wanted:
            names[type_id] = string(strings, name_off)
        at += _TYPE.size + _FIXED.get(kind, 0) + _EACH.get(kind, 0) * (info & 0xFFFF)
        type_id += 1
    return names


def member_offsets(blob: bytes, name: str) -> dict[str, int]:
    """Where the members of a structure are, in bytes; none if it is not there.

    It is searched for, and not walked to: that takes a moment for the kernel's 130,000
    types. What is found must look like a structure in every one of its members.
    """
    types, strings = sections(blob)
    name_off = strings.find(b"\0" + name.encode() + b"\0") + 1
    if not name_off:
        return {}
    wanted = struct.pack("=I", name_off)
    at = types.find(wanted)
    while at >= 0:
        members = _members(types, strings, at) if at % 4 == 0 else {}
        if members:
            return members
        at = types.find(wanted, at + 1)
    return {}


def _members(types: bytes, strings: bytes, at: int) -> dict[str, int]:
    """The members of the structure at ``at``; none if that is no structure."""
    if at + _TYPE.size > len(types):
        return {}
    _, info, size = _TYPE.unpack_from(types, at)
    count = info & 0xFFFF
    end = at + _TYPE.size + count * _MEMBER.size
    if info >> 24 & 0x1F != _STRUCT or end > len(types):
        return {}
    found: dict[str, int] = {}
    for name_off, _, bits in _MEMBER.iter_unpack(types[at + _TYPE.size : end]):
        # With the kind flag, the upper byte is a bit-field's size.
        offset = (bits & 0xFFFFFF if info >> 31 else bits) >> 3
        if name_off >= len(strings) or offset > size:
            return {}
        found[string(strings, name_off)] = offset
    return found


def sections(blob: bytes) -> tuple[bytes, bytes]:
    """Types and strings; empty if this is no BTF."""
    if len(blob) < _HEADER.size:
        return b"", b""
    magic, _, _, header, type_off, type_len, str_off, str_len = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        return b"", b""
    types = blob[header + type_off : header + type_off + type_len]
    return types, blob[header + str_off : header + str_off + str_len]


def string(strings: bytes, at: int) -> str:
    """The string at an offset into the strings' section."""
    end = strings.find(b"\0", at)
    return strings[at : end if end >= 0 else len(strings)].decode("utf-8", "backslashreplace")
