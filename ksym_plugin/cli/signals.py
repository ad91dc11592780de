"""Signals as a descriptor to poll, and a command's exit status as a shell gives it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import Any, Union

from ksym_plugin.cli.output import say
from ksym_plugin.kernel.worker import Forked

#: What a command is run as.
Process = Union["subprocess.Popen[bytes]", Forked]

STOPS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
#: A shell's exit status for a command that it cannot find, cannot run, or that was killed by
#: a signal, to which its number is added.
NOT_FOUND = 127
NOT_RUN = 126
BY_SIGNAL = 128


class Signals:
    """From entering to leaving, signals make ``fd`` readable instead of interrupting.

    For the main thread. A process that is started meanwhile is not affected: handlers end
    with its exec, and both ends of the pipe are close-on-exec.
    """

    def __enter__(self) -> Signals:
        self._undo = contextlib.ExitStack()
        self.fd, write = os.pipe()
        for fd in (self.fd, write):
            self._undo.callback(os.close, fd)
            os.set_blocking(fd, False)
        before: Any = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._undo.callback(signal.set_wakeup_fd, before)
        for number in (*STOPS, signal.SIGCHLD):
            before = signal.getsignal(number)
            # SIGINT is taken also where a shell's ``&`` made it ignored; SIGHUP not under nohup.
            if number != signal.SIGHUP or before != signal.SIG_IGN:
                # The handler has nothing to do: the number is in the pipe already.
                signal.signal(number, lambda *_: None)
                self._undo.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def take(self) -> set[int]:
        """The signals that arrived since the last call."""
        arrived: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                arrived.update(os.read(self.fd, 4096))
        return arrived

    def wait(self, child: Process) -> int:
        """Wait until a command ends; stop signals are passed on. Its status as a shell has it."""
        while (status := child.poll()) is None:
            # SIGCHLD makes it readable too.
            select.select([self.fd], [], [])
            pass_on(self.take(), child)
        return shell_status(status)


def shell_status(returncode: int) -> int:
    """A command's exit status as a shell has it, from Popen's."""
    return returncode if returncode >= 0 else BY_SIGNAL - returncode


def not_run(name: str, error: OSError) -> int:
    """Say that a command cannot be run; the exit status for that, as a shell has it."""
    say(f"{name} cannot be run ({error.strerror}); name a command that is there")
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN


def pass_on(arrived: set[int], child: Process) -> None:
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
