"""The process that ``ksym pyspy record`` samples: one that runs, or a command to be run."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal

from ksym_plugin.cli.output import say
from ksym_plugin.cli.stopping import is_foreground
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Final

    from ksym_plugin.cli.stopping import Signals

STOPS: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
#: Stopping so many threads for each sample holds a process up (py-spy's issue 872).
_MANY_THREADS: Final = 32
_LOW_RATE: Final = 20
_PYTHON: Final = re.compile(rb"(?:libpython|/python)(\d)\.(\d+)")
#: What a shell's exit status is for a command it cannot find, cannot run, or that was killed.
_NOT_FOUND: Final = 127
_NOT_RUN: Final = 126
_BY_SIGNAL: Final = 128


class Command:
    """A process that becomes ``call`` once it is let go; ``pid`` stays the same.

    On leaving, it is waited for, also by an error: it is somebody's work and has done
    nothing wrong. One that was never let go just ends. Signals are passed on meanwhile.
    """

    def __init__(self, call: Sequence[str], signals: Signals) -> None:
        self._name = call[0]
        self._signals = signals
        self._status: int | None = None
        go, self._go = os.pipe()
        try:
            self.pid = os.fork()
            if not self.pid:
                os.close(self._go)
                _become(call, go)
        except BaseException:
            os.close(self._go)
            raise
        finally:
            os.close(go)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._go >= 0:
            os.close(self._go)
        elif kind is not None and not self._is_over():
            say(f"sampling has failed; {self._name} goes on, and is waited for")
        self.wait()

    def let_go(self) -> None:
        """Have it become the command; it has, or has ended, when this returns."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"x")
        # Its end of the pipe is closed by exec, or with the process.
        poll = select.poll()
        poll.register(self._go, 0)
        poll.poll()
        os.close(self._go)
        self._go = -1

    def end(self) -> None:
        if not self._is_over():
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; its exit status as a shell has it."""
        while not self._is_over():
            select.select([self._signals.fd], [], [])
            for number in self._signals.take() & STOPS:
                # A terminal's Ctrl-C has reached it by itself.
                if not self._is_over() and (number != signal.SIGINT or not is_foreground()):
                    os.kill(self.pid, number)
        return self._status or 0

    def _is_over(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                has_exited = os.WIFEXITED(status)
                self._status = (
                    os.WEXITSTATUS(status) if has_exited else _BY_SIGNAL + os.WTERMSIG(status)
                )
        return self._status is not None


def _become(call: Sequence[str], go: int) -> None:
    """Wait for a byte, then run the command in this process's place; never returns."""
    status = _NOT_RUN
    try:
        if os.read(go, 1):
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.execvp(call[0], list(call))  # noqa: S606 - the user's own; no shell between
    except OSError as error:
        status = _NOT_FOUND if isinstance(error, FileNotFoundError) else status
        say(f"{call[0]} cannot be run ({error.strerror}); name a command that is there")
    finally:
        os._exit(status)


def python_of(pid: int) -> tuple[int, int] | None:
    """The version of Python that a process runs, by its files' names; None if none tells."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            found = _PYTHON.search(file.read())
    except OSError:
        return None
    return None if found is None else (int(found[1]), int(found[2]))


def require_fit(pid: int, rate: int, is_stopped: bool) -> None:
    """KsymError for a process that is not there, has a debugger, or would be held up.

    ``is_stopped`` says that py-spy will stop it ``rate`` times a second.
    """
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        raise KsymError(f"there is no process {pid}", "name one that runs") from None
    tracers = (_status(pid, tid, "TracerPid") for tid in tids)
    traced = sorted({words[0] for words in tracers if words and words[0] != "0"})
    if traced:
        raise KsymError(
            f"process {pid} is held by process {traced[0]}, a debugger or tracer, and there can"
            " be only one",
            "end that one first",
        )
    if len(tids) > _MANY_THREADS and rate > _LOW_RATE and is_stopped:
        raise KsymError(
            f"process {pid} has {len(tids)} threads, and py-spy would stop each of them"
            f" {rate} times a second",
            f"use --rate {_LOW_RATE} or less, or --nonblocking",
        )


def _status(pid: int, tid: str, field: str) -> list[str]:
    """The values of a line of /proc/PID/task/TID/status; none if the thread is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{tid}/status", "rb") as file:
        for line in file.read().decode(errors="replace").splitlines():
            name, _, values = line.partition(":")
            if name == field:
                return values.split()
    return []


def family(pid: int) -> list[int]:
    """A process and all that it started and that still run."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for tid in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{tid}/children", encoding="ascii") as file:
                    found += map(int, file.read().split())
    return found


def outer_ids(pids: Iterable[int]) -> Mapping[int, int]:
    """This namespace's ids of threads by those in a PID namespace of their own."""
    outer: dict[int, int] = {}
    for pid in pids:
        if len(_status(pid, str(pid), "NSpid")) < 2:
            continue
        with contextlib.suppress(OSError):
            for tid in os.listdir(f"/proc/{pid}/task"):
                ids = _status(pid, tid, "NSpid")
                if len(ids) > 1:
                    outer[int(ids[-1])] = int(ids[0])
    return outer


def is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
