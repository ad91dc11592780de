"""Loads and unloads programs as fast as Python can: one buffer for all, no log."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import time

from tests.oracle import programs, rawbpf

_PROG_LOAD = 5
_CODE = programs.insn(0xB7) + programs.insn(0x95)


def allow(files: int) -> None:
    """Let this process have so many files open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        hard = files
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def load(count: int, code: bytes = _CODE) -> tuple[list[int], list[int]]:
    """``count`` programs ``burst_N``: their descriptors, and when each was loaded."""
    insns = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"GPL")
    attr = bytearray(144)
    head = (1, len(code) // 8, ctypes.addressof(insns), ctypes.addressof(license_))
    struct.pack_into("=IIQQ", attr, 0, *head)
    fds, times = [], []
    for index in range(count):
        struct.pack_into("=16s", attr, 48, b"burst_%d" % index)
        fds.append(rawbpf._bpf(_PROG_LOAD, attr))
        times.append(time.monotonic_ns())
    return fds, times


def unload(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
