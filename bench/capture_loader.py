"""Loads programs with source lines: ``python -m bench.capture_loader COUNT LIFE_MS RATE``.

Each is unloaded after its life, so RATE * LIFE are there at a time. Says of each, a line of
JSON: its id, and the ns from the return of BPF_PROG_LOAD to the close of its descriptor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque

from tests.oracle import programs, rawbpf


def main() -> None:
    count, life, rate = int(sys.argv[1]), float(sys.argv[2]) * 1e6, float(sys.argv[3])
    lives = run(count, int(life), int(1e9 / rate))
    sys.stdout.writelines(json.dumps(one) + "\n" for one in lives)


def run(count: int, life: int, interval: int) -> list[tuple[int, int]]:
    lives: list[tuple[int, int]] = []
    held: deque[tuple[int, int, int]] = deque()
    loaded, following = 0, time.monotonic_ns()
    while held or loaded < count:
        ending = held[0][1] + life if held else None
        due = min(at for at in (ending, following if loaded < count else None) if at is not None)
        time.sleep(max(0, due - time.monotonic_ns()) / 1e9)
        if due == ending:
            prog_id, began, fd = held.popleft()
            lives.append((prog_id, time.monotonic_ns() - began))
            os.close(fd)
            continue
        fd = programs.with_lines("lines", "bench_lined_function", loaded % 7)
        began = time.monotonic_ns()
        held.append((rawbpf.info(fd).id, began, fd))
        loaded += 1
        following = max(following + interval, began)
    return lives


if __name__ == "__main__":
    main()
