"""Loads and unloads BPF programs in turn: ``python -m bench.live_loader COUNT PAUSE_MS [lines]``.

One is alive at a time; with "lines" they have line information. Says of each, a line of
JSON: its start, its name in kallsyms, and CLOCK_MONOTONIC ns when BPF_PROG_LOAD had
returned. The pauses vary, so that they keep no step with a source that polls.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

from tests.oracle import programs, rawbpf


def main() -> None:
    count, pause = int(sys.argv[1]), float(sys.argv[2]) / 1000
    vary = random.Random(1)
    for number in range(count):
        if sys.argv[3:] == ["lines"]:
            fd = programs.with_lines(f"bench_{number}", "oracle_lined_function", number % 7)
        else:
            fd = programs.plain(f"bench_{number}", number, work=40)
        returned = time.monotonic_ns()
        info = rawbpf.info(fd)
        name = f"bpf_prog_{info.tag}_{info.name}"
        sys.stdout.write(json.dumps([info.starts[0], name, returned]) + "\n")
        time.sleep(pause * vary.uniform(0.5, 1.5))
        os.close(fd)
        time.sleep(pause * vary.uniform(0.5, 1.5))


if __name__ == "__main__":
    main()
