"""Programs that outlive their unload: ``python3 -m tests.vm.guest.outliving TRUTH DATA``.

Each is held by a program array alone, runs a long bpf_loop once, and is deleted from the
array meanwhile, which is its unload. Once it has ended, programs of its size are loaded
until one lies where its loop's body was, and that one runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.oracle import procs, programs, rawbpf, runner
from tests.vm.guest.around import sampled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TURNS, _TRIES = 3, 10
_MEASURED = 2_000
#: How long each runs, in ns: less than grace lasts, also where everything takes twice as long.
_LASTS = 700_000_000
_NEWCOMER_RUNS = 300_000_000
_DEADLINE = 20.0
_MOST = 40


def rounds() -> int:
    """How many bodies take ``_LASTS``, by the fastest of some: others may hold the machine up."""
    flag = rawbpf.map_create(rawbpf.ARRAY)
    fd = programs.long_runner("measured", ["measured_main", "measured_body"], 1, flag, _MEASURED)
    took = min(rawbpf.test_run(fd, 1) for _ in range(5))
    rawbpf.close(fd, flag)
    return _MEASURED * _LASTS // took


class Outliving:
    """One of them; ``told`` is what is true of it."""

    def __init__(self, turn: int, count: int) -> None:
        self._flag = rawbpf.map_create(rawbpf.ARRAY)
        self._array = rawbpf.map_create(rawbpf.PROG_ARRAY)
        functions = [f"outliving_main_{turn}", f"outliving_body_{turn}"]
        fd = programs.long_runner("outliving", functions, turn + 2, self._flag, count)
        info, names = rawbpf.info(fd), rawbpf.kallsyms_bpf()
        self.told: dict[str, Any] = {
            "loaded": time.monotonic_ns(),
            "symbols": [[s, s + n, names[s]] for s, n in zip(info.starts, info.lens)],
        }
        rawbpf.map_set(self._array, fd)
        rawbpf.close(fd)
        self._caller = programs.tail_caller("tail", self._array)

    def run(self) -> bool:
        """Run it, unload it, and wait for its end; whether that came after the unload."""
        child = os.fork()
        if not child:
            rawbpf.test_run(self._caller, 1)
            os._exit(0)
        deadline = time.monotonic() + _DEADLINE
        while rawbpf.map_get(self._flag) != 1:
            assert time.monotonic() < deadline
        began = time.monotonic_ns()
        rawbpf.map_delete(self._array)
        self.told["unloading"] = [began, time.monotonic_ns()]
        outlives = os.waitpid(child, os.WNOHANG) == (0, 0)
        if outlives:
            os.waitpid(child, 0)
        self.told["ended"] = time.monotonic_ns()
        rawbpf.close(self._caller, self._array, self._flag)
        return outlives


def take_place(start: int, end: int, seed: int) -> dict[str, Any]:
    """Load programs until one lies over an address of the range; have it run."""
    deadline = time.monotonic() + _DEADLINE
    held: list[int] = []
    try:
        while time.monotonic() < deadline:
            fd = programs.plain("newcomer", seed)
            held.append(fd)
            info = rawbpf.info(fd)
            low, high = info.starts[0], info.starts[0] + info.lens[0]
            if max(low, start) < min(high, end):
                name, began = rawbpf.kallsyms_bpf()[low], time.monotonic_ns()
                runner.burn(fd, _NEWCOMER_RUNS)
                return {"symbol": [low, high, name], "running": [began, time.monotonic_ns()]}
            if len(held) == _MOST:
                rawbpf.close(*held)
                held.clear()
            time.sleep(0.02)  # It is freed a grace period late.
    finally:
        rawbpf.close(*held)
    raise procs.Failed("nothing took the place")


def turns(count: int) -> list[dict[str, Any]]:
    """What is true of ``_TURNS`` of them, a newcomer after each."""
    told: list[dict[str, Any]] = []
    for turn in range(_TRIES):
        outliving = Outliving(turn, count)
        if not outliving.run():
            continue  # The machine was held up, and then it ended first.
        start, end, _ = outliving.told["symbols"][1]
        outliving.told["newcomer"] = take_place(start, end, 50 + turn)
        told.append(outliving.told)
        if len(told) == _TURNS:
            break
    return told


def main() -> None:
    count = rounds()
    with sampled(sys.argv[2], frequency=249):
        told = turns(count)
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
