"""Stands in for iovisor's bcc: no compiler, no kernel.

It keeps bcc's habits that matter: it writes to descriptor 2, and through C's buffer to
1, raises plain Exception, registers its clean-up with atexit and so keeps itself alive.
``said`` is what the next BPF() writes to 2, ``fails`` what it then raises.
"""

from __future__ import annotations

import atexit
import ctypes
import os

said = b""
fails = ""
load_fails = ""
made = []


class _Function:
    def __init__(self, fd):
        self.fd = fd


class _Table:
    def __init__(self, map_fd):
        self.map_fd = map_fd


class BPF:
    KPROBE = 2

    def __init__(self, text=b"", cflags=()):
        made.append(self)
        self.text, self.cflags = text, list(cflags)
        self.cleaned = 0
        self.funcs, self.tables = {}, {}
        atexit.register(self.cleanup)
        os.write(2, said)
        ctypes.CDLL(None).printf(b"Unable to find this or that\n")
        if fails:
            raise Exception(fails)
        if "-DKSYM_FENTRY" in cflags:
            for name in (b"kfunc__bpf_ksym_add", b"kfunc__bpf_ksym_del"):
                self.load_func(name, 26)

    def load_func(self, name, prog_type):
        if load_fails:
            os.write(2, b"bpf: Failed to load program: " + load_fails.encode())
            raise Exception(load_fails)
        self.funcs[name] = _Function(os.open(os.devnull, os.O_RDONLY))
        return self.funcs[name]

    def __getitem__(self, name):
        if name not in self.tables:
            self.tables[name] = _Table(os.open(os.devnull, os.O_RDONLY))
        return self.tables[name]

    def donothing(self):
        pass

    def cleanup(self):
        self.cleaned += 1
        os.write(2, b"Exception ignored in: KeyError\n")
        for function in self.funcs.values():
            os.close(function.fd)
        for table in self.tables.values():
            os.close(table.map_fd)
        self.funcs, self.tables = {}, {}
