"""What perf's own interpreter loads is light: that has only the standard library.

Each module is imported alone, by the system's Python without site-packages, and what that
brought into ``sys.modules`` is counted. No clock is involved.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests import house

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

#: Needs pyelftools, and is imported where somebody asks for what needs it.
EXEMPT = "ksym_plugin.kernel.elf"

#: What perf's interpreter lacks, and what costs more than the whole core to import.
HEAVY = frozenset(
    "asyncio bcc click concurrent.futures dataclasses elftools importlib.metadata inspect logging "
    "pkg_resources pluggy typing unittest".split()
)

#: Standard modules that one core module may bring with it at the most. The handler needs
#: 40: os and its kin, struct, mmap, re, and sqlite3, which brings 18 by itself.
MOST = 48

_CHILD = """
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
__import__(sys.argv[2])
print(*sorted(set(sys.modules) - before))
"""


def core_modules() -> list[str]:
    """The package itself, and what is in the rooms that perf's interpreter loads."""
    names = map(house.module_of, house.files())
    rooms = ("names", *house.LOADED_BY_PERF)
    return [name for name in names if house.room_of(name) in rooms and name != EXEMPT]


@functools.cache
def interpreter() -> str:
    """The system's Python, as perf embeds it; the one running this where that is too old."""
    system = "/usr/bin/python3"
    check = [system, "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]
    if os.path.exists(system) and subprocess.run(check, check=False).returncode == 0:
        return system
    return sys.executable


def brought(module: str) -> set[str]:
    """What importing ``module`` alone adds to sys.modules."""
    done = subprocess.run(
        [interpreter(), "-S", "-E", "-s", "-B", "-c", _CHILD, REPO, module],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
        text=True,
    )
    assert done.returncode == 0, f"{module} does not import in {interpreter()}:\n{done.stderr}"
    return set(done.stdout.split())


def test_the_core_is_found() -> None:
    assert {"ksym_plugin", "ksym_plugin.timeline.timeline", "ksym_plugin.perf.handler"} <= set(
        core_modules()
    )


def test_what_is_heavy_would_be_seen() -> None:
    assert {"dataclasses", "inspect"} <= brought("dataclasses") & HEAVY
    assert len(brought("logging")) > len(brought("os"))


@pytest.mark.parametrize("module", core_modules())
def test_core_module_is_light(module: str) -> None:
    loaded = brought(module)
    assert not loaded & HEAVY
    foreign = {name for name in loaded if name.split(".")[0] != "ksym_plugin"}
    assert len(foreign) <= MOST, sorted(foreign)
