"""A program compiled by clang and loaded by libbpf: BPF as most of it comes to the kernel."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

from tests.oracle import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "five.bpf.c")
FUNCTIONS = {
    "classify_ingress_traffic_main",
    "classify_payload_global_long",
    "mix_hash_rounds_static_long",
    "fold",
    "tail",
}
#: In a mount namespace of its own the pin, and so the program, goes with the shell.
_LOAD = """
mount -t bpf bpf /sys/fs/bpf &&
bpftool prog load "$1" /sys/fs/bpf/five >&2 &&
bpftool -j prog show pinned /sys/fs/bpf/five && read -r _
"""


def compile_five(folder: str) -> str:
    made = os.path.join(folder, "five.o")
    procs.run(["clang", "-O2", "-g", "-target", "bpf", "-c", SOURCE, "-o", made], 60)
    return made


@contextlib.contextmanager
def loaded(path: str) -> Iterator[int]:
    """The program's id, for as long as it is loaded."""
    command = ["unshare", "-m", "sh", "-c", _LOAD, "sh", path]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield json.loads(procs.read_line(child.stdout.fileno(), 30))["id"]
        child.stdin.close()
        child.wait(20)
    finally:
        procs.end(child)
