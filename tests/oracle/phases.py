"""A Python process that knows what it did when: for grafting kernel frames onto Python's.

Two threads run three functions in turn, each with a system call of its own; one of them
goes through a BPF socket filter. When each call of a function began and ended is written
down, in CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import threading
import time

from tests.oracle import programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: How the BPF program is called that runs under ``filtering`` and nothing else.
PROGRAM = "phase_filter"
_SO_ATTACH_BPF = 50


def statting(until: int) -> None:
    while time.monotonic_ns() < until:
        os.stat("/usr/lib/../lib/../lib/../lib/python3")


class Reading:
    def __init__(self) -> None:
        self._fd = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)

    def reading(self, until: int) -> None:
        while time.monotonic_ns() < until:
            os.read(self._fd, 1 << 17)


def loaded() -> int:
    """The BPF program: to be stopped by a tracer makes bpf(2) give up with EAGAIN."""
    while True:
        try:
            return programs.plain(PROGRAM, 7)
        except BlockingIOError:
            continue


class Filtering:
    """Sends datagrams to itself; a filter drops them all."""

    def __init__(self, program: int) -> None:
        self._to, self._from = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._from.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_BPF, program)

    def filtering(self, until: int) -> None:
        while time.monotonic_ns() < until:
            with contextlib.suppress(PermissionError):  # what a filter's no is for the sender
                self._to.send(b"x" * 64)


class Worker(threading.Thread):
    """One of the two; ``log`` is what it did: function, begin, end."""

    def __init__(self, seed: int, phase_ns: int, until: int, program: int) -> None:
        super().__init__()
        self.log: list[tuple[str, int, int]] = []
        self._random = random.Random(seed)
        self._phase = phase_ns
        self._until = until
        self._functions: list[Callable[[int], None]] = [
            statting,
            Reading().reading,
            Filtering(program).filtering,
        ]

    def run(self) -> None:
        last = None
        while time.monotonic_ns() < self._until:
            function = self._random.choice([f for f in self._functions if f != last])
            last = function
            length = self._phase * self._random.uniform(0.8, 1.2)
            began = time.monotonic_ns()
            function(began + int(length))
            self.log.append((function.__name__, began, time.monotonic_ns()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ms", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--truth", required=True)
    parser.add_argument("--idlers", type=int, default=0, help="further threads that wait")
    parser.add_argument("--churn", action="store_true", help="short-lived threads too")
    args = parser.parse_args()
    program = loaded()
    until = time.monotonic_ns() + int(args.seconds * 1e9)
    over = threading.Event()
    idlers = [threading.Thread(target=over.wait) for _ in range(args.idlers)]
    workers = [Worker(seed, int(args.ms * 1e6), until, program) for seed in (1, 2)]
    for thread in (*idlers, *workers):
        thread.start()
    with open(args.truth, "w", encoding="utf-8"):
        pass  # That it is there tells that work has begun.
    gone: list[Worker] = []
    while time.monotonic_ns() < until:
        if args.churn:
            end = time.monotonic_ns() + 150_000_000
            brief = Worker(len(gone), int(args.ms * 1e6), end, program)
            brief.start()
            brief.join()
            gone.append(brief)
        else:
            time.sleep(0.05)
    over.set()
    for thread in (*idlers, *workers):
        thread.join()
    with open(args.truth, "w", encoding="utf-8") as file:
        json.dump({str(worker.native_id): worker.log for worker in (*workers, *gone)}, file)


if __name__ == "__main__":
    main()
