"""Programs at work beside this one, as perf and py-spy: what they say goes to a file.

They end when this process does, however it ends: py-spy may not hold a process for ever.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time

from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Final

_CHUNK = 65536


def ask(question: Callable[[], object], seconds: float) -> object:
    """What ``question`` returns (anything JSON has), asked in a child; TimeoutError if late.

    A child that hangs in the kernel cannot be ended. It is left behind, holding nothing
    of ours: whoever reads our output must not wait for it.
    """
    answer, write = os.pipe()
    child = os.fork()
    if not child:
        _answer(question, write)
    os.close(write)
    try:
        data = _read(answer, seconds)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(answer)
    os.waitpid(child, 0)
    answered: object = json.loads(data)
    return answered


def _answer(question: Callable[[], object], write: int) -> None:
    """The child's whole life."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        data = json.dumps(question()).encode()
        while data:
            data = data[os.write(write, data) :]
        os._exit(0)
    finally:
        os._exit(1)


def _read(fd: int, seconds: float) -> bytes:
    deadline = time.monotonic() + seconds
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            return data or b"null"
        data += chunk


_PR_SET_PDEATHSIG: Final = 1
_START_SECONDS: Final = 30.0
#: perf and py-spy write what they have; with thousands of programs perf takes its time.
_END_SECONDS: Final = 120.0
_STEP_SECONDS: Final = 0.01
_libc = ctypes.CDLL(None)


class Child:
    """A program from its start on; ``log`` is the file for what it says.

    KsymError if it cannot be run.
    """

    def __init__(
        self, call: Sequence[str], log: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        parent = os.getpid()

        def end_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
            if os.getppid() != parent:  # It ended before it could be followed.
                os._exit(1)

        with open(log, "wb") as file:
            try:
                # A session of its own: a terminal's Ctrl-C is for this process to pass on.
                self._process = subprocess.Popen(
                    call,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # Unsafe beside threads, and there are none. Only the child itself can
                    # ask for this signal, and a pipe's end is nothing that perf looks at.
                    preexec_fn=end_with_parent,  # noqa: PLW1509
                    env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
                )
            except OSError as error:
                raise KsymError(
                    f"{call[0]} cannot be run ({error.strerror})", "install it"
                ) from error

    @property
    def status(self) -> int | None:
        """As ``Popen.returncode``; None while it runs."""
        return self._process.poll()

    def wait_for(self, said: bytes) -> bool:
        """Wait until it says so; False if it ended without, or it takes too long."""
        return self.wait_until(lambda: self._has_said(said)) or self._has_said(said)

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Wait until it is so; False if the child ended, or was ended as it takes too long."""
        until = time.monotonic() + _START_SECONDS
        while not is_so():
            if self.status is not None:
                return False
            if time.monotonic() > until:
                self.kill()
                return False
            time.sleep(_STEP_SECONDS)
        return True

    def _has_said(self, said: bytes) -> bool:
        with open(self._log, "rb") as file:
            return said in file.read()

    def last_lines(self, size: int) -> list[bytes]:
        """The whole lines in the last ``size`` bytes of what it said."""
        with open(self._log, "rb") as file:
            file.seek(max(0, os.path.getsize(self._log) - size))
            return file.read().splitlines()[1:]

    def problem(self) -> str:
        """What it said went wrong: its first error, else its last word."""
        with open(self._log, "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip() and not line.startswith(("[", " "))]
        errors = [line.partition("Error: ")[2] for line in told if line.startswith("Error: ")]
        return (errors or told[-1:] or ["it said nothing"])[0]

    def end(self, number: int, seconds: float = _END_SECONDS) -> None:
        """Send it a signal and wait for its end, which comes by force after so long."""
        if self.status is None:
            self._process.send_signal(number)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.status is None:
            self._process.kill()
            self._process.wait()


_LOWEST_REALTIME = 1


def run_promptly() -> None:
    """Have the scheduler run this process as soon as it wakes, if that is allowed.

    A source without time stamps knows of a change only that it came before it was read:
    the sooner that is, the fewer samples fall between two programs at one address. For a
    process that sleeps nearly always: the kernel's bandwidth limit for real-time tasks
    holds (sched_rt_runtime_us), and children do not inherit it. Needs CAP_SYS_NICE.
    """
    how = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(0, how, os.sched_param(_LOWEST_REALTIME))
    except OSError:
        return
