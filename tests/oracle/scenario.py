"""The two-process scenario: one process loads and unloads, another runs and is profiled.

``python3 -m tests.oracle.scenario --out DIR`` starts loader, runner and perf, and leaves
``DIR/perf.data`` and ``DIR/truth.json``. It can be wrapped by a recorder
(``RECORDER -- python3 -m tests.oracle.scenario ...``), and with ``--loader SOCKET`` it uses a
loader that was started earlier, whose programs are then older than the recorder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys

from tests.oracle import loader, perfctl, procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

#: Seconds after which a whole scenario is given up, on a quiet machine, for whoever runs it.
SECONDS = 90.0
_READY_SECONDS = 120.0


class Result:
    """Where the profile is (it is absent with ``perf="none"``), and what is true of it."""

    __slots__ = ("data", "truth")

    def __init__(self, directory: str) -> None:
        self.data = os.path.join(directory, "perf.data")
        with open(os.path.join(directory, "truth.json"), encoding="utf-8") as file:
            self.truth: dict[str, Any] = json.load(file)


def command(directory: str, *options: str) -> list[str]:
    """The scenario as a command line, to run alone or under a recorder."""
    return [sys.executable, "-m", "tests.oracle.scenario", "--out", directory, *options]


def run(directory: str, *options: str) -> Result:
    """Run it in a process group of its own, with a time limit."""
    procs.run(command(directory, *options), SECONDS)
    return Result(directory)


@contextlib.contextmanager
def child(
    module: str, *options: str, fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the oracle's that has said it is ready; killed when left before its end."""
    line = [sys.executable, "-m", f"tests.oracle.{module}", *options]
    process = procs.start(line, fds=fds, own_group=False, out=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if procs.read_line(process.stdout.fileno(), _READY_SECONDS) != b"ready\n":
            raise procs.Failed(f"the {module} did not start")
        yield process
    finally:
        procs.end(process)


@contextlib.contextmanager
def loading(directory: str, mode: str, count: int) -> Iterator[str]:
    """The loader's socket."""
    path = os.path.join(directory, "loader.sock")
    with child("loader", "--listen", path, "--mode", mode, "--count", str(count)):
        yield path


def _profile(args: argparse.Namespace, socket_path: str) -> None:
    go_read, go_write = os.pipe()
    truth = os.path.join(args.out, "truth.json")
    options = ["--loader", socket_path, "--go", str(go_read), "--truth", truth]
    options += ["--ms", str(args.ms), "--clock", args.clock]
    if args.kill_parent_after is not None:
        options += ["--kill", str(os.getppid()), "--kill-after", str(args.kill_parent_after)]
    try:
        with child("runner", *options, fds=(go_read,)) as runner:
            perf = _start_perf(args, runner.pid)
            try:
                os.write(go_write, b"g")
                status = runner.wait(SECONDS * procs.PATIENCE)
            finally:
                if perf is not None:
                    perf.stop()
            if status:
                raise procs.Failed(f"the runner ended with {status}")
    finally:
        os.close(go_read)
        os.close(go_write)


def _start_perf(args: argparse.Namespace, runner: int) -> perfctl.Recording | None:
    if args.perf == "none":
        return None
    target = ["-a"] if args.perf == "all" else ["-p", str(runner)]
    # Of all tasks but the idle ones, which a machine has much of.
    event = "cpu-clock:I" if args.perf == "all" else "cpu-clock"
    data = os.path.join(args.out, "perf.data")
    return perfctl.Recording(data, args.clock, [*target, *args.also.split()], event=event)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="an existing directory")
    parser.add_argument("--clock", choices=sorted(perfctl.CLOCKS), default="mono")
    parser.add_argument("--perf", choices=("task", "all", "none"), default="task")
    parser.add_argument("--mode", choices=loader.MODES, default="turn")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--ms", type=int, default=30, help="how long each program runs")
    parser.add_argument("--also", default="", help="further options of perf record")
    parser.add_argument("--loader", help="the socket of a loader that runs already")
    parser.add_argument("--kill-parent-after", type=int, help="SIGKILL the parent, after that one")
    args = parser.parse_args()
    try:
        with contextlib.ExitStack() as stack:
            path = args.loader or stack.enter_context(loading(args.out, args.mode, args.count))
            _profile(args, path)
    except procs.Failed as error:
        sys.exit(f"scenario: {error}")


if __name__ == "__main__":
    main()
