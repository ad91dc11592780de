"""The ``[bpf]`` lines of /proc/kallsyms: names and images, but no lengths.

Reading them costs a read of the whole file, about 0.06 s without BPF and growing with
the square of the number of BPF symbols, so this is for snapshots, not for following.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

KALLSYMS: Final = "/proc/kallsyms"
_MARK: Final = b"\t[bpf]\n"


def bpf_lines(path: str = KALLSYMS) -> list[tuple[int, str]]:
    """(start, name) of the BPF symbols, by start.

    Empty where net.core.bpf_jit_kallsyms is 0 or addresses are hidden (they are all
    zero then), and where there is no kallsyms.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
    except OSError:
        return []
    return parse_bpf_lines(data)


def parse_bpf_lines(data: bytes) -> list[tuple[int, str]]:
    """(start, name) of the BPF symbols in kallsyms' text, by start."""
    # The kernel lists them together, near the end: the rest is never looked at by Python.
    first = data.find(_MARK)
    if first < 0:
        return []
    block = data[data.rfind(b"\n", 0, first) + 1 : data.rfind(_MARK) + len(_MARK)]
    lines: list[tuple[int, str]] = []
    for line in block.decode("utf-8", "backslashreplace").split("\n"):
        fields = line.split()
        if len(fields) != 4 or fields[3] != "[bpf]":
            continue
        try:
            start = int(fields[0], 16)
        except ValueError:
            continue
        if start:
            lines.append((start, fields[2]))
    lines.sort()
    return lines
