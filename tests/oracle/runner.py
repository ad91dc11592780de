"""The process that is profiled: runs each program the loader hands it.

Around each run it names itself after the program (``p17``, else ``idle``). perf keeps those
changes with its own clock and prints the name on every sample, so the truth about a sample
travels in the sample, whatever the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import time

from tests.oracle import rawbpf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

IDLE = "idle"
_PR_SET_NAME = 15
_STEP_SECONDS = 120.0
_CALIBRATION = 100

_libc = ctypes.CDLL(None, use_errno=True)


def set_comm(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def burn(fd: int, nanoseconds: int) -> None:
    """Run a program for about that much CPU time; the first runs tell how many it takes."""
    end = time.thread_time_ns() + nanoseconds
    each = max(rawbpf.test_run(fd, _CALIBRATION), 1)
    # Who is interrupted in the first runs takes them to be slow, and has more to do.
    while (left := end - time.thread_time_ns()) > each:
        rawbpf.test_run(fd, left // each)


def run_one(fd: int, step: dict[str, Any], nanoseconds: int) -> list[int]:
    set_comm(step["comm"])
    began = time.monotonic_ns()
    try:
        if step["once"]:
            rawbpf.test_run(fd, 1)
        else:
            burn(fd, nanoseconds)
    finally:
        ended = time.monotonic_ns()
        set_comm(IDLE)
        os.close(fd)
    return [began, ended]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", required=True)
    parser.add_argument("--go", type=int, required=True, help="descriptor that says when")
    parser.add_argument("--truth", required=True)
    parser.add_argument("--clock", default="", help="only noted in the truth")
    parser.add_argument("--ms", type=int, default=30)
    parser.add_argument("--kill", type=int, default=0, help="a process to SIGKILL ...")
    parser.add_argument("--kill-after", type=int, default=-1, help="... after that program")
    args = parser.parse_args()
    set_comm(IDLE)
    truth: dict[str, Any] = {"tid": os.getpid(), "clock": args.clock, "killed": None}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as loader:
        loader.settimeout(_STEP_SECONDS)
        loader.connect(args.loader)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        os.read(args.go, 1)
        done = 0
        while True:
            data, fds, _, _ = socket.recv_fds(loader, 1 << 18, 1)
            if not data:
                sys.exit("the loader went away")
            step = json.loads(data)
            if "end" in step:
                truth["programs"] = step["end"]
                break
            times = run_one(fds[0], step, args.ms * 1_000_000)
            if done == args.kill_after:
                os.kill(args.kill, signal.SIGKILL)
                truth["killed"] = time.monotonic_ns()
            done += 1
            loader.send(json.dumps({"run": times}).encode())
    with open(args.truth, "w", encoding="utf-8") as file:
        json.dump(truth, file, indent=1)


if __name__ == "__main__":
    main()
