"""perf as a child that says when it is recording and is told when to stop."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.oracle import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CLOCKS = {"mono": ["-k", "CLOCK_MONOTONIC"], "perf": []}
_READY_SECONDS = 120.0
_STOP_SECONDS = 180.0


def record_command(path: str, clock: str, target: Sequence[str], event: str) -> list[str]:
    return [
        *["perf", "record", "-e", event, "-F", "4000", "-g", "-o", path],
        *CLOCKS[clock],
        *target,
    ]


class Recording:
    """``perf record``, enabled when the constructor returns; its messages are in ``log``."""

    def __init__(
        self,
        path: str,
        clock: str,
        target: Sequence[str],
        own_group: bool = False,
        event: str = "cpu-clock",
    ) -> None:
        self.path = path
        self.log = path + ".log"
        control_read, self._control = os.pipe()
        self._acks, acks_write = os.pipe()
        command = record_command(path, clock, target, event)
        command += ["-D", "-1", f"--control=fd:{control_read},{acks_write}"]
        try:
            with open(self.log, "wb") as log:
                self._child = procs.start(
                    command,
                    fds=(control_read, acks_write),
                    own_group=own_group,
                    out=log.fileno(),
                    err=subprocess.STDOUT,
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(control_read)
            os.close(acks_write)
        try:
            self.enable()
        except BaseException:
            self.abort()
            raise

    def enable(self) -> None:
        self._have(b"enable\n")

    def disable(self) -> None:
        """No samples are taken until ``enable``."""
        self._have(b"disable\n")

    def _have(self, done: bytes) -> None:
        os.write(self._control, done)
        if not procs.read_line(self._acks, _READY_SECONDS):
            raise procs.Failed(f"perf record has ended: {self.messages()}")

    def messages(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def stop(self) -> None:
        """Have perf write its file to the end. Ending by the signal we sent is success."""
        try:
            if self._child.poll() is None:
                self._child.send_signal(signal.SIGINT)
            status = self._child.wait(_STOP_SECONDS)
        except BaseException:
            self.abort()
            raise
        self._close()
        if status not in (0, -signal.SIGINT):
            raise procs.Failed(f"perf record ended with {status}: {self.messages()}")

    def abort(self) -> None:
        procs.end(self._child)
        self._close()

    def _close(self) -> None:
        for fd in (self._control, self._acks):
            if fd >= 0:
                os.close(fd)
        self._control = self._acks = -1
