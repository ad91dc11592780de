"""The process that loads and unloads: hands each program to the runner that connects.

``python3 -m tests.oracle.loader --listen SOCKET --mode MODE --count N`` prints ``ready`` once
its first program is loaded (``preloaded``: all of them), serves one runner and ends. What it
knows of each program comes from bpf(2) and from the kernel's own ``[bpf]`` lines.

Modes:
    turn         one program at a time, no two alike
    same-name    runs of one and the same program, name and tag, with others in between
    subprograms  like turn, each with two BPF subprograms and names longer than 15 characters
    preloaded    all of them loaded before anyone connects, unloaded at the end
    grace        each unloaded while it still runs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time

from tests.oracle import procs, programs, rawbpf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MODES = ("turn", "same-name", "subprograms", "preloaded", "grace")
MOST = 90
_CONNECT_SECONDS = 300.0
_STEP_SECONDS = 120.0
# About 0.1 s in one run.
_GRACE_ROUNDS = 30_000


class Program:
    """One program that is loaded, and what is true of it."""

    __slots__ = ("_array", "_flag", "fd", "truth")

    def __init__(self, mode: str, index: int) -> None:
        self._flag = self._array = -1
        began = time.monotonic_ns()
        if mode == "grace":
            self._flag = rawbpf.map_create(rawbpf.ARRAY)
            self._array = rawbpf.map_create(rawbpf.PROG_ARRAY)
            began = time.monotonic_ns()
        self.fd = _load(mode, index, self._flag)
        info = rawbpf.info(self.fd)
        self.truth: dict[str, Any] = {
            "index": index,
            "comm": f"p{index}",
            "id": info.id,
            "tag": info.tag,
            "load_time": info.load_time,
            "loading": [began, time.monotonic_ns()],
            "symbols": [[s, s + n, None] for s, n in zip(info.starts, info.lens)],
        }
        if mode == "grace":
            self._hide_behind_tail_call(index)

    def _hide_behind_tail_call(self, index: int) -> None:
        """Leave the program array as the only holder, and give the runner its caller."""
        rawbpf.map_set(self._array, self.fd)
        rawbpf.close(self.fd)
        self.fd = programs.tail_caller(f"tail_{index}", self._array)

    def learn_names(self) -> None:
        names = rawbpf.kallsyms_bpf()
        for symbol in self.truth["symbols"]:
            symbol[2] = names[symbol[0]]

    def unload_while_running(self) -> None:
        if self._array < 0:
            return
        deadline = time.monotonic() + _STEP_SECONDS
        while rawbpf.map_get(self._flag) != 1:
            if time.monotonic() > deadline:
                raise procs.Failed("the program never ran")
        began = time.monotonic_ns()
        rawbpf.map_delete(self._array)
        self.truth["unloading"] = [began, time.monotonic_ns()]

    def unload(self) -> None:
        began = time.monotonic_ns()
        rawbpf.close(self.fd, self._flag, self._array)
        self.truth.setdefault("unloading", [began, time.monotonic_ns()])


def _load(mode: str, index: int, flag: int) -> int:
    # The sizes differ a little, so that some successors only overlap.
    work = 180 + index * 7 % 40
    if mode == "subprograms":
        parts = ("oracle_main_function", "oracle_left", "oracle_right")
        functions = [f"{part}_{index}" for part in parts]
        return programs.with_subprograms("oracle_main", functions, index * 3 + 1, work // 2)
    if mode == "grace":
        functions = [f"oracle_lasting_main_{index}", f"oracle_lasting_body_{index}"]
        return programs.long_runner("oracle_last", functions, index + 1, flag, _GRACE_ROUNDS)
    if mode == "same-name" and index % 3 != 2:
        return programs.plain("oracle_same", 1)
    return programs.plain(f"oracle_{index}", index + 2, work)


class Loader:
    def __init__(self, mode: str, count: int) -> None:
        self._mode = mode
        self._count = count
        self._waiting: list[Program] = []
        for index in range(count if mode == "preloaded" else 1):
            self._waiting.append(Program(mode, index))
        self._kept: list[Program] = []

    def serve(self, runner: socket.socket) -> None:
        truths = []
        for index in range(self._count):
            program = self._waiting.pop(0) if self._waiting else Program(self._mode, index)
            self._serve_one(runner, program)
            truths.append(program.truth)
        for program in self._kept:
            program.unload()
        runner.send(json.dumps({"end": truths}).encode())

    def _serve_one(self, runner: socket.socket, program: Program) -> None:
        grace = self._mode == "grace"
        if grace:  # Once it runs, its lines are about to go.
            program.learn_names()
        step = {"comm": program.truth["comm"], "once": grace}
        socket.send_fds(runner, [json.dumps(step).encode()], [program.fd])
        if grace:
            program.unload_while_running()
        else:  # The runner is busy now: a good time for the slow file.
            program.learn_names()
        program.truth["run"] = json.loads(runner.recv(4096))["run"]
        if self._mode == "preloaded":
            self._kept.append(program)
        else:
            program.unload()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--mode", choices=MODES, default="turn")
    parser.add_argument("--count", type=int, default=60)
    args = parser.parse_args()
    if not 1 <= args.count <= MOST:
        parser.error(f"--count is 1 to {MOST}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(args.listen)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(args.listen)
        listening.listen(1)
        listening.settimeout(_CONNECT_SECONDS)
        loader = Loader(args.mode, args.count)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        runner, _ = listening.accept()
        with runner:
            runner.settimeout(_STEP_SECONDS)
            loader.serve(runner)


if __name__ == "__main__":
    main()
