"""BPF maps through bpf(2): what of them the probes' sources need."""

from __future__ import annotations

import os
import struct
from array import array

from ksym_plugin.kernel import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_RINGBUF: Final = 27
#: map_type, key_size, value_size, max_entries
_CREATE: Final = struct.Struct("=IIII")
#: map_fd, padding, the addresses of key and value, flags
_ELEMENT: Final = struct.Struct("=IIQQQ")


def lookup(map_fd: int, key: int, value: array[int]) -> None:
    """Read an element with a 32-bit key into ``value``, which must have room for all of it."""
    _element(syscalls.MAP_LOOKUP_ELEM, map_fd, key, value)


def update(map_fd: int, key: int, value: array[int]) -> None:
    """Write an element with a 32-bit key."""
    _element(syscalls.MAP_UPDATE_ELEM, map_fd, key, value)


def has_ring() -> bool:
    """Whether this kernel has BPF_MAP_TYPE_RINGBUF; found out by making one."""
    attr = array("B", _CREATE.pack(_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE")) + bytes(56))
    try:
        fd = syscalls.bpf(syscalls.MAP_CREATE, attr)
    except OSError:
        return False
    os.close(fd)
    return True


def _element(command: int, map_fd: int, key: int, value: array[int]) -> None:
    keys = array("I", (key,))
    addresses = keys.buffer_info()[0], value.buffer_info()[0]
    syscalls.bpf(command, array("B", _ELEMENT.pack(map_fd, 0, *addresses, 0)))
