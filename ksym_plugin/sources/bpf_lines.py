"""The lines of /proc/kallsyms for generated code: names and images, but no lengths.

That is ``[bpf]``, and the out-of-line code of kprobes and ftrace under modules of
which the kernel makes up the names. Reading them costs a read of the whole file, about
0.06 s without BPF and growing with the square of the number of BPF symbols, so this is
for snapshots, not for following.
"""

from __future__ import annotations

from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

KALLSYMS: Final = "/proc/kallsyms"
_OOL_PREFIX: Final = "[__builtin__"
_MARKS: Final = (b"\t[bpf]\n", b"\t[__builtin__")


class Lines:
    """``bpf``: (start, name) by start; ``ool``: (start, name, module) of other code."""

    __slots__ = ("bpf", "ool")

    def __init__(self) -> None:
        self.bpf: list[tuple[int, str]] = []
        self.ool: list[tuple[int, str, str]] = []


def read_lines(path: str = KALLSYMS) -> Lines:
    """What kallsyms lists now.

    Empty where there is no kallsyms and where addresses are hidden (they are all zero
    then); without ``bpf`` where net.core.bpf_jit_kallsyms is 0.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except OSError:
        return Lines()
    return parse_lines(data)


def parse_lines(data: bytes) -> Lines:
    """The lines in kallsyms' text."""
    # The kernel lists them near the end: what comes before is never looked at by Python.
    found = [at for at in (data.find(mark) for mark in _MARKS) if at >= 0]
    lines = Lines()
    if not found:
        return lines
    block = data[data.rfind(b"\n", 0, min(found)) + 1 :]
    for line in block.decode("utf-8", "backslashreplace").split("\n"):
        fields = line.split()
        if len(fields) == 4:
            _sort_in(lines, fields[0], fields[2], fields[3])
    lines.bpf.sort()
    lines.ool.sort()
    return lines


def _sort_in(lines: Lines, start: str, name: str, module: str) -> None:
    try:
        address = int(start, 16)
    except ValueError:
        return
    if not address:
        return
    if module == BPF_MODULE:
        lines.bpf.append((address, name))
    elif module.startswith(_OOL_PREFIX):
        lines.ool.append((address, name, module[1:-1]))
