"""Which kernel and which boot this is: a table of addresses belongs to one of them."""

from __future__ import annotations

import os
import struct

_GNU_BUILD_ID = 3  # NT_GNU_BUILD_ID in elf.h
_HEADER = struct.Struct("=III")  # Elf64_Nhdr: name length, description length, type


def build_id(path: str = "/sys/kernel/notes") -> str | None:
    """The running kernel's build id in hex, from its ELF notes; None where it has none."""
    try:
        with open(path, "rb") as file:
            return build_id_of(file.read(1 << 20))
    except OSError:
        return None


def build_id_of(notes: bytes) -> str | None:
    """The build id in hex from a section of ELF notes, None where there is none."""
    at = 0
    while at + _HEADER.size <= len(notes):
        name_size, size, kind = _HEADER.unpack_from(notes, at)
        name_at = at + _HEADER.size
        start = name_at + (name_size + 3 & ~3)
        if start + size > len(notes):
            return None
        if kind == _GNU_BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0":
            return notes[start : start + size].hex() or None
        at = start + (size + 3 & ~3)
    return None


def boot_id(path: str = "/proc/sys/kernel/random/boot_id") -> str | None:
    """The UUID the kernel drew at this boot, None where it cannot be read."""
    return read_text(path).strip() or None


def release() -> str:
    """The kernel's release, as ``uname -r`` prints it."""
    return os.uname().release


def hostname() -> str:
    """This host's name, as ``uname -n`` prints it."""
    return os.uname().nodename


def possible_nodes(path: str = "/sys/devices/system/node/possible") -> int:
    """How many NUMA nodes this kernel can have (num_possible_nodes); 1 where it has no NUMA."""
    parts = [part.partition("-") for part in read_text(path).strip().split(",")]
    try:
        return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
    except ValueError:
        return 1


def read_text(path: str) -> str:
    """A small file, such as those of /proc and /sys; ``""`` where it cannot be read."""
    try:
        # A thread's name may have carriage returns.
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return file.read()
    except OSError:
        return ""
