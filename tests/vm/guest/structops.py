"""Registers a congestion control made of BPF programs, by hand: bpf(2) and bpftool's BTF text."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct

from tests.oracle import procs, programs, rawbpf

_STRUCT_OPS_MAP, _STRUCT_OPS_PROG = 26, 27
_MAP_CREATE, _MAP_UPDATE, _MAP_DELETE, _PROG_LOAD = 0, 2, 3, 5
#: What tcp_register_congestion_control() insists on.
_MEMBERS = ("ssthresh", "cong_avoid", "undo_cwnd")


@functools.cache
def kernel_btf() -> str:
    """The kernel's BTF as text, which takes seconds."""
    return procs.run(["bpftool", "btf", "dump", "file", "/sys/kernel/btf/vmlinux"], 120).out


class Struct:
    """A structure as ``bpftool btf dump`` prints it."""

    def __init__(self, text: str, name: str) -> None:
        found = re.search(rf"^\[(\d+)\] STRUCT '{name}' size=(\d+).*\n((?:\t.*\n)*)", text, re.M)
        assert found, name
        self.id, self.size = int(found[1]), int(found[2])
        members = re.findall(r"^\t'([^']+)' .*bits_offset=(\d+)", found[3], re.M)
        self.names = [name for name, _ in members]
        self.offsets = {name: int(bits) // 8 for name, bits in members}


class CongestionControl:
    """Registered while it is open; ``fds`` are its programs."""

    def __init__(self, name: str) -> None:
        text = kernel_btf()
        ops = Struct(text, "tcp_congestion_ops")
        value = Struct(text, "bpf_struct_ops_tcp_congestion_ops")
        self.fds = [_program(ops, member) for member in _MEMBERS]
        btf_fd = rawbpf.load_btf(programs.btf(["unused"]))
        self._map = _create(value, btf_fd)
        self.fds += [self._map, btf_fd]
        data = bytearray(value.size)
        base = value.offsets["data"]
        for member, fd in zip(_MEMBERS, self.fds):
            struct.pack_into("=Q", data, base + ops.offsets[member], fd)
        struct.pack_into("=16s", data, base + ops.offsets["name"], name.encode())
        _element(_MAP_UPDATE, self._map, data)

    def close(self) -> None:
        _element(_MAP_DELETE, self._map, bytearray(8))
        for fd in self.fds:
            os.close(fd)


def _program(ops: Struct, member: str) -> int:
    code = programs.insn(0xB7) + programs.insn(0x95)
    insns = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"GPL")
    attr = bytearray(144)
    pointers = ctypes.addressof(insns), ctypes.addressof(license_)
    struct.pack_into("=IIQQ", attr, 0, _STRUCT_OPS_PROG, 2, *pointers)
    struct.pack_into("=16s", attr, 48, f"cc_{member}".encode())
    struct.pack_into("=I", attr, 68, ops.names.index(member))  # expected_attach_type
    struct.pack_into("=I", attr, 108, ops.id)  # attach_btf_id
    return rawbpf._bpf(_PROG_LOAD, attr)


def _create(value: Struct, btf_fd: int) -> int:
    attr = bytearray(144)
    struct.pack_into("=IIII", attr, 0, _STRUCT_OPS_MAP, 4, value.size, 1)
    # btf_fd, btf_key_type_id, btf_value_type_id, btf_vmlinux_value_type_id
    struct.pack_into("=IIII", attr, 48, btf_fd, 0, 0, value.id)
    return rawbpf._bpf(_MAP_CREATE, attr)


def _element(command: int, map_fd: int, value: bytearray) -> None:
    key = ctypes.create_string_buffer(4)
    buffer = ctypes.create_string_buffer(bytes(value), len(value))
    attr = bytearray(144)
    where = ctypes.addressof(buffer) if command == _MAP_UPDATE else 0
    struct.pack_into("=IIQQQ", attr, 0, map_fd, 0, ctypes.addressof(key), where, 0)
    rawbpf._bpf(command, attr)
