"""What a trampoline traces: its name holds the number of a function's type in BTF.

``bpf_trampoline_<key>``: the upper 32 bits of the key are the id of a BTF object, with
bit 31 set, or of a program; the lower 31 are a type id in it (bpf_trampoline_compute_key()
in include/linux/bpf_verifier.h). Only functions of the kernel image are told here: what
has types of its own, a module or a program, does so on top of others'.
"""

from __future__ import annotations

import os
from array import array

from ksym_plugin import syscalls
from ksym_plugin.sources import btf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

IN_BTF: Final = 0x8000_0000
_TYPE_MASK: Final = 0x7FFF_FFFF
_VMLINUX: Final = "/sys/kernel/btf/vmlinux"
#: struct bpf_btf_info: where name, name_len and kernel_btf are, in 64- and 32-bit words.
_NAME: Final = 2
_NAME_LENGTH: Final = 6
_KERNEL: Final = 7
_ROOM: Final = 64


class Targets:
    """Names of the kernel's functions by trampoline key; its types are read when needed."""

    def __init__(self, path: str = _VMLINUX) -> None:
        self._path = path
        self._types: bytes | None = None
        self._known: dict[int, str] = {}
        self._is_image: dict[int, bool] = {}

    def name(self, key: int) -> str:
        """The function's name, ``""`` where it cannot be told."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(key)
        return found

    def _look_up(self, key: int) -> str:
        holder = key >> 32
        if not key & IN_BTF or not 0 < holder < 1 << 32:
            return ""
        if holder not in self._is_image:
            self._is_image[holder] = _is_image(holder)
        if not self._is_image[holder]:
            return ""
        if self._types is None:
            try:
                with open(self._path, "rb") as file:
                    self._types = file.read()
            except OSError:
                self._types = b""
        type_id = key & _TYPE_MASK
        return btf.function_names(self._types, [type_id]).get(type_id, "")


def _is_image(btf_id: int) -> bool:
    """Whether a BTF object holds the kernel image's types."""
    try:
        fd = syscalls.bpf(syscalls.BTF_GET_FD_BY_ID, array("I", (btf_id, 0, 0, 0)))
    except OSError:
        return False
    try:
        name = array("B", bytes(_ROOM))
        info = array("Q", bytes(32))
        info[_NAME] = name.buffer_info()[0]
        words = memoryview(info).cast("B").cast("I")
        words[_NAME_LENGTH] = _ROOM
        attr = array("I", (fd, 32, 0, 0))
        memoryview(attr).cast("B").cast("Q")[1] = info.buffer_info()[0]
        syscalls.bpf(syscalls.OBJ_GET_INFO_BY_FD, attr)
        return words[_KERNEL] == 1 and name.tobytes().startswith(b"vmlinux\0")
    except OSError:
        return False
    finally:
        os.close(fd)
