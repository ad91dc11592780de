"""What the handler costs before its first sample: all it imports, in the system's Python.

Wall time of a fresh ``python3 -I`` that imports it and reads its options, less that of
one that does nothing; in turn, so that a busy moment meets both.
"""

from __future__ import annotations

import os
import subprocess
import time

from bench.measure import REPO, SYSTEM_PYTHON, Figures
from bench.report import WALL, not_measured, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ROUNDS = 21
_BAR = ("<=", 60)
_NAME = "importing all the handler needs"
_OURS = (
    f"import sys; sys.path.insert(0, {REPO!r}); from ksym_plugin.perf import handler;"
    " handler.parse([])"
)


def rows(quick: bool) -> list[dict[str, Any]]:
    if not os.path.exists(SYSTEM_PYTHON):
        return [not_measured(_NAME, "ms", _BAR, f"there is no {SYSTEM_PYTHON}")]
    bare, ours, click = [], [], []
    for turn in range((2 if quick else ROUNDS) + 1):
        for code, taken in (("", bare), (_OURS, ours), ("import argparse, sqlite3", click)):
            spent = start(code)
            if turn:
                taken.append(spent)
    least = Figures(bare).median
    return [
        row(
            _NAME,
            Figures([spent - least for spent in ours]),
            "ms",
            _BAR,
            WALL,
            "argparse and sqlite3 of these",
            Figures(click).median - least,
            f"above the {least:.1f} ms of an empty script",
        )
    ]


def start(code: str) -> float:
    """Milliseconds a fresh system Python takes for ``code``."""
    began = time.perf_counter()
    # Without a time limit: with one, subprocess looks for the end only now and then.
    subprocess.run([SYSTEM_PYTHON, "-I", "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3
