"""Signals as a descriptor to poll, and a command's exit status as a shell gives it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from typing import Any

    from ksym_plugin.kernel.worker import Forked

STOPS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
#: A shell's exit status for a command that it cannot find, cannot run, or that was killed by
#: a signal, to which its number is added.
NOT_FOUND = 127
NOT_RUN = 126
BY_SIGNAL = 128
_SIGNALS = (*STOPS, signal.SIGCHLD)


class Signals:
    """From entering to leaving, signals make ``fd`` readable instead of interrupting.

    For the main thread. A process that is started meanwhile is not affected: handlers end
    with its exec, and both ends of the pipe are close-on-exec.
    """

    def __init__(self) -> None:
        self.fd = -1
        self._write = -1
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Signals:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            before = signal.getsignal(number)
            # SIGINT is taken also where a shell's ``&`` made it ignored; SIGHUP not under nohup.
            if number != signal.SIGHUP or before != signal.SIG_IGN:
                self._before[number] = before
                # The handler has nothing to do: the number is in the pipe already.
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.fd)
        os.close(self._write)

    def take(self) -> set[int]:
        """The signals that arrived since the last call."""
        arrived: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                arrived.update(os.read(self.fd, 4096))
        return arrived

    def wait(self, child: subprocess.Popen[bytes] | Forked) -> int:
        """Wait until a command ends; stop signals are passed on. Its status as a shell has it."""
        while (status := child.poll()) is None:
            # SIGCHLD makes it readable too.
            select.select([self.fd], [], [])
            pass_on(self.take(), child)
        return shell_status(status)


def shell_status(returncode: int) -> int:
    """A command's exit status as a shell has it, from Popen's."""
    return returncode if returncode >= 0 else BY_SIGNAL - returncode


def not_run_status(error: OSError) -> int:
    """The exit status for a command that cannot be run."""
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN


def pass_on(arrived: set[int], child: subprocess.Popen[bytes] | Forked) -> None:
    """Send a command the stop signals that have arrived here.

    SIGINT not where a Ctrl-C on the terminal has reached it too.
    """
    for number in arrived & STOPS:
        if child.poll() is None and (number != signal.SIGINT or not _is_foreground()):
            os.kill(child.pid, number)


def _is_foreground() -> bool:
    """Whether a Ctrl-C on the terminal reaches this process and those it has started."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)
