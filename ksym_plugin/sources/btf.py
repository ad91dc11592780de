"""Function names out of a program's BTF, the kernel's type information.

The full name of a BPF function is only there and in kallsyms: bpf_prog_info cuts it
after 15 characters and has none for subprograms. The format is that of
Documentation/bpf/btf.rst; whatever does not follow it yields no names, never an error.
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
_FUNC: Final = 12
#: kind: bytes after the type itself, and for each of its ``vlen`` members.
_FIXED: Final = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH: Final = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_LAST_KIND: Final = 19


def function_names(blob: bytes, type_ids: Collection[int]) -> dict[int, str]:
    """The names of those of ``type_ids`` that are functions, by type id."""
    if len(blob) < _HEADER.size:
        return {}
    magic, _, _, header, type_off, type_len, str_off, str_len = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        return {}
    types = blob[header + type_off : header + type_off + type_len]
    strings = blob[header + str_off : header + str_off + str_len]
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
            names[type_id] = _string(strings, name_off)
        at += _TYPE.size + _FIXED.get(kind, 0) + _EACH.get(kind, 0) * (info & 0xFFFF)
        type_id += 1
    return names


def _string(strings: bytes, at: int) -> str:
    end = strings.find(b"\0", at)
    return strings[at : end if end >= 0 else len(strings)].decode("utf-8", "backslashreplace")
