"""Compiles and loads the probe with bcc, in a process of its own: started by bcc_program.

So the compiler and its 130 MB go when it is done, what it prints goes where its parent
wants it, and what bcc keeps until a process ends ends at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket

from ksym_plugin.sources import bcc_loader
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, NoReturn

#: The answer is one datagram.
_MOST_SAID: Final = 4096


def main(fd: int) -> NoReturn:
    """Do what the parent asks for over the socket ``fd``, and give it the descriptors."""
    with socket.socket(fileno=fd) as parent:
        request = json.loads(parent.recv(1 << 20))
        answer: dict[str, str] = {}
        fds: list[int] = []
        try:
            fds = _load(request)
        except SourceError as error:
            answer = {"problem": error.problem, "remedy": error.remedy}
        except Exception as error:  # noqa: BLE001 - bcc raises nothing narrower
            answer = {"raised": str(error)[:_MOST_SAID]}
        # Not all that bcc prints has left C's buffers.
        ctypes.CDLL(None).fflush(None)
        socket.send_fds(parent, [json.dumps(answer).encode()], fds)
    # Past bcc's own clean-up: it prints, and the kernel does it better.
    os._exit(0)


def _load(request: dict[str, Any]) -> list[int]:
    """Programs and maps in the order asked for, then whatever holds the programs attached."""
    bcc = bcc_loader.load()
    bpf: Any = bcc.BPF(text=request["text"].encode(), cflags=request["flags"])
    programs = []
    for name in (name.encode() for name in request["programs"]):
        # bcc has loaded and attached by itself what it knows by its name.
        function = bpf.funcs.get(name) or bpf.load_func(name, bcc.BPF.KPROBE)
        programs.append(function.fd)
    maps = [bpf[name.encode()].map_fd for name in request["maps"]]
    return [*programs, *maps, *bpf.kfunc_entry_fds.values()]
