"""Which CPUs there are."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

ONLINE: Final = "/sys/devices/system/cpu/online"
POSSIBLE: Final = "/sys/devices/system/cpu/possible"


def online_text() -> str:
    """The kernel's list, such as ``0-3,6``; cheap to compare with an earlier one."""
    try:
        with open(ONLINE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"0-{(os.cpu_count() or 1) - 1}"


def possible_count() -> int:
    """How many CPUs there can be: so many values a per-CPU map has."""
    with open(POSSIBLE, encoding="ascii") as file:
        return parse_cpu_list(file.read().strip())[-1] + 1


def parse_cpu_list(text: str) -> list[int]:
    """The CPUs of a list in the kernel's notation."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
