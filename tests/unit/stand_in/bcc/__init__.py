"""Stands in for iovisor's bcc: no compiler, no kernel, and descriptors of /dev/null.

It keeps bcc's habits that matter: it writes to descriptor 2, and through C's buffer to
1, raises plain Exception, and loads by itself what has a name that starts with kfunc__.
KSYM_STAND_IN names a JSON file: ``said`` is what BPF() writes, ``fails`` what it then
raises, ``load_fails`` what loading a function raises, ``dies`` ends the process. What it
was called with is appended to the file's name with ``.log``.
"""

from __future__ import annotations

import ctypes
import json
import os

_NAME = os.environ["KSYM_STAND_IN"]
with open(_NAME, encoding="utf-8") as _file:
    _TOLD = json.load(_file)


class _Held:
    def __init__(self):
        self.fd = self.map_fd = os.open(os.devnull, os.O_RDONLY)


class BPF:
    KPROBE = 2

    def __init__(self, text=b"", cflags=()):
        with open(f"{_NAME}.log", "a", encoding="utf-8") as file:
            file.write(json.dumps(cflags) + "\n")
        assert b"bpf_probe_read_kernel_str" in text
        ctypes.CDLL(None).printf(b"Unable to find this or that\n")
        os.write(2, _TOLD.get("said", "").encode())
        if "dies" in _TOLD:
            os._exit(9)
        if "fails" in _TOLD:
            raise Exception(_TOLD["fails"])
        self.funcs, self.kfunc_entry_fds = {}, {}
        if "-DKSYM_FENTRY" in cflags:
            for name in (b"kfunc__bpf_ksym_add", b"kfunc__bpf_ksym_del"):
                self.funcs[name] = self.load_func(name, 26)
                self.kfunc_entry_fds[name] = _Held().fd

    def load_func(self, name, prog_type):
        if "load_fails" in _TOLD:
            os.write(2, b"bpf: Failed to load program: Invalid argument\n")
            raise Exception(_TOLD["load_fails"])
        return _Held()

    def __getitem__(self, name):
        return _Held()
