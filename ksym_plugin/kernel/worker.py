"""Processes that work for this one.

A ``Worker`` runs a function of ours, because it may hang in the kernel, needs much memory,
or has to be in time. A ``Child`` is a program such as perf or py-spy.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from array import array

from ksym_plugin.kernel.identity import read_text
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    Answer = TypeVar("Answer")
    #: What a worker runs, with its end of the connection.
    Serve = Callable[["Connection"], None]

_LENGTH_BYTES = 4
_CHUNK = 1 << 16
#: File descriptors that may come with one message.
_MOST_FDS = 8
#: Under -I, which keeps the working directory's modules out: root may record anywhere.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from ksym_plugin.kernel import worker; worker.run(*sys.argv[2:])"
)
#: How long a killed process may take to end when the machine is busy; in the kernel it may hang.
_KILL_SECONDS = 3.0
_STEP_SECONDS = 0.005
_START_SECONDS = 30.0
#: perf and py-spy write what they have; with thousands of programs perf takes its time.
_END_SECONDS = 120.0
_PR_SET_PDEATHSIG = 1
_LOWEST_REALTIME = 1


class Connection:
    """One end of a socket between this process and a worker; messages come whole, in order.

    A message is anything that pickle takes: nobody else can write there.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._data = bytearray()
        self._messages: list[object] = []
        self._is_over = False
        #: What could not be sent yet without waiting.
        self.unsent = bytearray()
        #: Descriptors that came with messages. They are closed with this, unless taken out.
        self.fds: list[int] = []

    def fileno(self) -> int:
        """Readable when something has come; -1 when nothing will any more."""
        return -1 if self._is_over else self._end.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message, and copies of descriptors with it; waits until there is room."""
        self.unsent += _packed(message)
        if fds:
            del self.unsent[: socket.send_fds(self._end, [self.unsent], fds)]
        self._end.sendall(self.unsent)
        self.unsent.clear()

    def post(self, *messages: object) -> None:
        """Send as much as can be sent without waiting; the rest stays in ``unsent``."""
        for message in messages:
            self.unsent += _packed(message)
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self._end.send(self.unsent, socket.MSG_DONTWAIT)]

    def read(self) -> list[object]:
        """The messages that have come, an exception of the function too; never waits."""
        self._fill()
        messages, self._messages = self._messages, []
        return messages

    def receive(self, seconds: float | None = None) -> Any:  # noqa: ANN401 - as sent
        """The next message; an exception of the function is raised. TimeoutError, EOFError."""
        give_up = None if seconds is None else time.monotonic() + seconds
        while not self._messages:
            if self._is_over:
                raise EOFError
            if not self.wait(None if give_up is None else give_up - time.monotonic()):
                raise TimeoutError
            self._fill()
        message = self._messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    def wait(self, seconds: float | None = None) -> bool:
        """Whether something comes within so many seconds; None waits for ever."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(None if seconds is None else max(0, 1000 * seconds)))

    def finish(self) -> None:
        """Tell the other end that no message will follow."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Idempotent."""
        self._is_over = True
        self._end.close()
        while self.fds:
            os.close(self.fds.pop())

    def _fill(self) -> None:
        """Take in what has come."""
        with contextlib.suppress(BlockingIOError):
            while not self._is_over:
                self._take_chunk()
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "little")
            if len(self._data) < end:
                break
            self._messages.append(pickle.loads(self._data[_LENGTH_BYTES:end]))  # noqa: S301 - our own
            del self._data[:end]

    def _take_chunk(self) -> None:
        """Take in some bytes, or that it is the end; BlockingIOError if there is nothing yet."""
        fds = array("i")
        room = socket.CMSG_LEN(_MOST_FDS * fds.itemsize)
        # Not socket.recv_fds(): it has a parameter for the flags, and leaves it out.
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            data, parts, _, _ = self._end.recvmsg(_CHUNK, room, flags)
        except ConnectionError:
            self._is_over = True
            return
        for _, _, part in parts:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
        self.fds += fds
        self._data += data
        self._is_over = not data


def _packed(message: object) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Worker(Connection):
    """A process that runs ``serve``, a function in a module of ours, with its own Connection.

    It is a new interpreter, and prints to ``output``; without that only its errors are
    printed, where this process prints its own. If ``is_forked`` it is a copy of this process,
    which must have no threads, and prints nowhere: whoever reads our output must not wait for
    a process that hangs. It ends with its function, which fails to send or to receive once
    this process is gone. A KsymError or OSError that the function raises is sent. ``close``
    ends it and what it has started. OSError if it cannot be started.
    """

    def __init__(self, serve: Serve, is_forked: bool = False, output: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._process: subprocess.Popen[bytes] | Forked | None = None
        try:
            with theirs:
                if is_forked:
                    self._process = _fork(serve, ours, theirs)
                else:
                    self._process = _start(serve, theirs.fileno(), output)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; idempotent."""
        super().close()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            has_ended(process, _KILL_SECONDS)


def ask(question: Callable[[], Answer], seconds: float) -> Answer:
    """What ``question`` returns in a forked process. TimeoutError, or EOFError if that died."""
    worker = Worker(lambda owner: owner.send(question()), is_forked=True)
    try:
        answer: Answer = worker.receive(seconds)
        return answer
    finally:
        worker.close()


def run(module: str, function: str, fd: str) -> None:
    """The whole life of a worker that is started anew."""
    import importlib

    serve = getattr(importlib.import_module(module), function)
    _serve(serve, Connection(socket.socket(fileno=int(fd))))


def _serve(serve: Serve, owner: Connection) -> None:
    # The owner may have ended, or have closed its end.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            serve(owner)
        except (KsymError, OSError) as error:
            owner.send(error)


def _start(serve: Serve, fd: int, output: int | None) -> subprocess.Popen[bytes]:
    import subprocess

    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    words = [folder, serve.__module__, serve.__name__, str(fd)]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _CODE, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if output is None else output,
        stderr=output,
        pass_fds=(fd,),
        # What a terminal sends is for this process to answer.
        start_new_session=True,
    )


def _fork(serve: Serve, ours: socket.socket, theirs: socket.socket) -> Forked:
    pid = os.fork()
    if not pid:
        try:
            ours.close()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nowhere, fd)
            _serve(serve, Connection(theirs))
        finally:
            os._exit(0)
    with contextlib.suppress(OSError):
        # What a terminal sends is for this process to answer.
        os.setpgid(pid, pid)
    return Forked(pid)


class Forked:
    """A child made by os.fork, with what is needed of Popen's interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """As ``Popen.poll``; 0 where SIGCHLD is ignored, as the kernel then keeps no status."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def has_ended(process: subprocess.Popen[bytes] | Forked, seconds: float) -> bool:
    """Whether a process ends within so many seconds; it is then no zombie."""
    give_up = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > give_up:
            return False
        time.sleep(_STEP_SECONDS)
    return True


def start_program(
    call: Sequence[str],
    end_signal: int,
    most_memory: int = 0,
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Popen of a program that gets ``end_signal`` when this process ends, however that does.

    ``most_memory`` bounds RLIMIT_DATA; what follows is Popen's. OSError or SubprocessError if
    it cannot be run.
    """
    import ctypes
    import resource
    import subprocess

    parent, libc = os.getpid(), ctypes.CDLL(None)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_memory if hard == resource.RLIM_INFINITY else min(most_memory, hard)

    def prepare() -> None:
        if most_memory:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        libc.prctl(_PR_SET_PDEATHSIG, end_signal, 0, 0, 0)
        if os.getppid() != parent:  # It ended before it could be followed.
            os._exit(1)

    # Only the child itself can ask for that signal. It has a session of its own: what a
    # terminal sends is for this process to answer.
    return subprocess.Popen(
        call,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509
    )


class Child:
    """A program such as perf or py-spy, from its start on; ``log`` is the file for its output.

    It ends when this process does: py-spy must not stop a process for ever. KsymError if it
    cannot be run.
    """

    def __init__(self, call: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
        import subprocess

        self._log = log
        with open(log, "wb") as file:
            try:
                self._process = start_program(
                    call,
                    signal.SIGINT,
                    stdin=subprocess.DEVNULL,
                    stdout=file.fileno(),
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "LC_ALL": "C.UTF-8", **environment},
                )
            except OSError as error:
                raise KsymError(
                    f"{call[0]} cannot be run ({error.strerror})", "install it"
                ) from error

    @property
    def status(self) -> int | None:
        """As ``Popen.returncode``; None while it runs."""
        return self._process.poll()

    def wait_for(self, words: bytes) -> bool:
        """Wait until it prints these; False if it ended without, or it takes too long."""
        return self.wait_until(lambda: words in self._printed()) or words in self._printed()

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False if it ended, or was ended as it takes too long."""
        give_up = time.monotonic() + _START_SECONDS
        while not condition():
            if self.status is not None:
                return False
            if time.monotonic() > give_up:
                self.kill()
                return False
            time.sleep(_STEP_SECONDS)
        return True

    def _printed(self) -> bytes:
        with open(self._log, "rb") as file:
            return file.read()

    def last_lines(self, size: int) -> list[bytes]:
        """The whole lines in the last ``size`` bytes of its output."""
        with open(self._log, "rb") as file:
            file.seek(max(0, os.path.getsize(self._log) - size))
            return file.read().splitlines()[1:]

    def problem(self) -> str:
        """What went wrong: the first error it printed, else its last line."""
        lines = self._printed().decode(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip() and not line.startswith(("[", " "))]
        errors = [line.partition("Error: ")[2] for line in lines if line.startswith("Error: ")]
        return (errors or lines[-1:] or ["it said nothing"])[0]

    def end(self, number: int, seconds: float = _END_SECONDS) -> None:
        """Send it a signal and wait for its end, which comes by force after so long."""
        if self.status is None:
            self._process.send_signal(number)
        if not has_ended(self._process, seconds):
            self.kill()

    def kill(self) -> None:
        if self.status is None:
            self._process.kill()
            self._process.wait()


def run_promptly() -> None:
    """Have the scheduler run this process as soon as it wakes, if CAP_SYS_NICE allows it.

    A source without time stamps knows of a change only that it came before it was read:
    the sooner that is, the fewer samples fall between two programs at one address. For a
    process that sleeps nearly always: the kernel's bandwidth limit for real-time tasks
    holds (sched_rt_runtime_us). Children do not inherit it.
    """
    policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(_LOWEST_REALTIME))


def thread_ids(pid: int) -> list[int]:
    """The ids of a process's threads; none where it is gone."""
    with contextlib.suppress(OSError):
        return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
    return []


def family(pid: int) -> list[int]:
    """A process and its descendants that still run."""
    found = [pid]
    for parent in found:
        for tid in thread_ids(parent):
            found += map(int, read_text(f"/proc/{parent}/task/{tid}/children").split())
    return found


def thread_status(tid: int) -> dict[str, list[str]]:
    """The words of each field of /proc/TID/status; none where the thread is gone."""
    lines = filter(None, read_text(f"/proc/{tid}/status").split("\n"))
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


def mapped_files(pid: int) -> bytes:
    """/proc/PID/maps; empty where the process is gone, or none of this user's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return file.read()
    return b""
