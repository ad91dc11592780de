"""What a trampoline traces: its name holds the number of a function's type in BTF.

``bpf_trampoline_<key>``: the upper 32 bits of the key are the id of a BTF object, with
bit 31 set, or of a program; the lower 31 are a type id in it (bpf_trampoline_compute_key()
in include/linux/bpf_verifier.h). Only functions of the kernel image are named here: type
ids of a module or of a program continue those of another object.
"""

from __future__ import annotations

import os
import struct
from array import array

from ksym_plugin.kernel import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_MAGIC = 0xEB9F
_HEADER = struct.Struct("=HBBIIIII")
_TYPE = struct.Struct("=III")
_MEMBER = struct.Struct("=III")
_STRUCT = 4
_FUNC = 12
#: kind: bytes after the type itself, and for each of its ``vlen`` members.
_FIXED = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_LAST_KIND = 19

#: struct bpf_btf_info (include/uapi/linux/bpf.h): btf, btf_size, id, name, name_len, kernel_btf
_INFO = struct.Struct("=QIIQII")
#: Marks the key of a trampoline whose function is in a BTF object.
IN_BTF = 0x8000_0000
_TYPE_MASK = 0x7FFF_FFFF
_VMLINUX = "/sys/kernel/btf/vmlinux"
#: The longest name of an object (MODULE_NAME_LEN), with some to spare.
_NAME_ROOM = 64


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
    return strings[at : end if end >= 0 else None].decode("utf-8", "backslashreplace")


class Targets:
    """Names of the kernel's functions by trampoline key; its types are read when needed."""

    def __init__(self, path: str = _VMLINUX, is_image: Callable[[int], bool] | None = None) -> None:
        self._path = path
        self._is_image = is_image or _is_image
        self._types: bytes | None = None
        self._known: dict[int, str] = {}

    def name(self, key: int) -> str:
        """The function's name, ``""`` where it is not known."""
        if key not in self._known:
            self._known[key] = self._look_up(key)
        return self._known[key]

    def _look_up(self, key: int) -> str:
        holder = key >> 32
        if not key & IN_BTF or not 0 < holder < 1 << 32 or not self._is_image(holder):
            return ""
        if self._types is None:
            try:
                with open(self._path, "rb") as file:
                    self._types = file.read()
            except OSError:
                self._types = b""
        type_id = key & _TYPE_MASK
        return function_names(self._types, [type_id]).get(type_id, "")


def read(btf_id: int) -> bytes:
    """The bytes of a BTF object that is loaded; none where it is gone or may not be read."""
    try:
        _, size, *_ = _info(btf_id)
        blob = array("B", bytes(size))
        _info(btf_id, blob=blob)
        return blob.tobytes()
    except OSError:
        return b""


def _is_image(btf_id: int) -> bool:
    """Whether a BTF object holds the kernel image's types."""
    name = array("B", bytes(_NAME_ROOM))
    try:
        *_, is_kernel_s = _info(btf_id, name=name)
    except OSError:
        return False
    return is_kernel_s == 1 and name.tobytes().startswith(b"vmlinux\0")


def _info(
    btf_id: int, blob: array[int] | None = None, name: array[int] | None = None
) -> tuple[int, ...]:
    """The fields of a bpf_btf_info; its types and its name fill ``blob`` and ``name``."""
    blob_at, blob_size = blob.buffer_info() if blob else (0, 0)
    name_at, name_size = name.buffer_info() if name else (0, 0)
    info = array("B", _INFO.pack(blob_at, blob_size, 0, name_at, name_size, 0))
    fd = syscalls.bpf(syscalls.BTF_GET_FD_BY_ID, array("I", (btf_id, 0, 0, 0)))
    try:
        syscalls.object_info(fd, info)
    finally:
        os.close(fd)
    return _INFO.unpack(info)
