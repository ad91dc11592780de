"""perf, py-spy and the recorder at work on one process: for ``ksym pyspy record``.

perf starts first and ends last, so that what py-spy saw lies within what perf saw. All
three end when this process does, however it ends: py-spy may not hold a process for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

from ksym_plugin.cli import grafting
from ksym_plugin.cli.grafting import Session
from ksym_plugin.cli.output import say
from ksym_plugin.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Final

    from ksym_plugin.cli.stopping import Signals

_PR_SET_PDEATHSIG: Final = 1
_START_SECONDS: Final = 30.0
#: perf and py-spy write what they have; with thousands of programs perf takes its time.
_END_SECONDS: Final = 120.0
_STEP_SECONDS: Final = 0.05
#: How long a command may take until it is a Python process.
_PATIENCE_SECONDS: Final = 5.0
#: Longer than anybody records: py-spy counts samples, and is told to stop.
_FOR_EVER: Final = "999999"
#: Stopping so many threads for each sample holds a process up (py-spy's issue 872).
_MANY_THREADS: Final = 32
_LOW_RATE: Final = 20
_PYTHON: Final = re.compile(rb"(?:libpython|/python)(\d)\.(\d+)")
#: What py-spy says, over and over, once it has lost a thread; it then never recovers.
_FAILED: Final = b"Failed to suspend process"
_FAILURES: Final = 30
_TAIL: Final = 1 << 13
_SAMPLING: Final = b"Sampling process"
_STOPS: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_libc = ctypes.CDLL(None)


class How:
    """What is asked of the samplers: their rates in samples a second, perf's event, and modes."""

    __slots__ = ("event", "frequency", "native", "nonblocking", "rate", "subprocesses")

    def __init__(
        self,
        rate: int,
        frequency: int,
        event: str,
        native: bool = False,
        nonblocking: bool = False,
        subprocesses: bool = False,
    ) -> None:
        self.rate = rate
        self.frequency = frequency
        self.event = event
        self.native = native
        self.nonblocking = nonblocking
        self.subprocesses = subprocesses


def py_spy() -> str:
    """The py-spy to run. KsymError if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    found = shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)
    if found is None:
        raise KsymError("py-spy is not installed", "install it: pip install 'ksym-plugin[pyspy]'")
    return found


def python_of(pid: int) -> tuple[int, int] | None:
    """The version of Python that a process runs, by its files' names; None if none tells."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            found = _PYTHON.search(file.read())
    except OSError:
        return None
    return None if found is None else (int(found[1]), int(found[2]))


def require_fit(pid: int, how: How) -> None:
    """KsymError for a process that is not there, has a debugger, or would be held up."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")
        tracers = {tid: _status(pid, tid, "TracerPid") for tid in tids}
    except FileNotFoundError:
        raise KsymError(f"there is no process {pid}", "name one that runs") from None
    traced = sorted({words[0] for words in tracers.values() if words and words[0] != "0"})
    if traced:
        raise KsymError(
            f"process {pid} is held by process {traced[0]}, a debugger or tracer, and there can"
            " be only one",
            "end that one first",
        )
    if len(tids) > _MANY_THREADS and how.rate > _LOW_RATE and not how.nonblocking:
        raise KsymError(
            f"process {pid} has {len(tids)} threads, and py-spy would stop each of them"
            f" {how.rate} times a second",
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


def hold(command: Sequence[str]) -> tuple[int, int]:
    """A process that becomes ``command`` once a byte is written; its id and where to write."""
    go, release = os.pipe()
    pid = os.fork()
    if pid:
        os.close(go)
        return pid, release
    status = 126
    try:
        os.close(release)
        if os.read(go, 1):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], list(command))  # noqa: S606
    except OSError as error:
        status = 127 if isinstance(error, FileNotFoundError) else status
        say(f"{command[0]} cannot be run ({error.strerror}); name a command that is there")
    finally:
        os._exit(status)


def end(pid: int, by_force: bool) -> int:
    """Wait for a command that ``hold`` started; its exit status as a shell has it."""
    if by_force:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


class Sampling:
    """One recording, in ``folder``; from entering to leaving its children run."""

    def __init__(self, folder: str, pid: int, how: How, signals: Signals) -> None:
        self.folder = folder
        self.session = Session()
        self.session.rate = how.rate
        self._pid = pid
        self._how = how
        self._signals = signals
        self._perf: subprocess.Popen[bytes] | None = None
        self._py_spy: subprocess.Popen[bytes] | None = None
        self._recorder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sampling:
        return self

    def __exit__(self, *_: object) -> None:
        for child in (self._py_spy, self._perf, self._recorder):
            if child is not None and child.poll() is None:
                child.kill()
                child.wait()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def start_recorder(self, history: str) -> None:
        """Follow BPF symbols into ``history``; what keeps it from that is said, not raised."""
        # Modules from where this process has them, and none of the working directory's.
        code = f"import sys; sys.path[:] = {sys.path!r}; from ksym_plugin.cli import main; main()"
        call = [sys.executable, "-I", "-c", code, "record", "-o", history]
        child = self._start(call, "recorder.log")
        if self._wait_for("recorder.log", b"recording with", child):
            self._recorder = child
            return
        problem = _last_line(self.path("recorder.log"))
        say(f"BPF symbols are not recorded: {problem}")

    def start_perf(self) -> None:
        """perf, recording when this returns. KsymError if it does not."""
        how, command, acknowledge = self._how, self.path("control"), self.path("ack")
        for name in (command, acknowledge):
            os.mkfifo(name, 0o600)
        pids = family(self._pid) if how.subprocesses else [self._pid]
        call = ["perf", "record", "-e", how.event, "-F", str(how.frequency), "-g"]
        call += ["--kernel-callchains", "-k", "CLOCK_MONOTONIC", "-D", "-1"]
        # perf would first list all programs, which takes it a minute with ten thousand.
        call += ["--no-bpf-event"] if self._recorder is not None else []
        call += [f"--control=fifo:{command},{acknowledge}", "-o", self.path(grafting.PERF_DATA)]
        call += ["-p", ",".join(map(str, pids))]
        # Both ends are opened here, so that neither side waits for the other's.
        writer = os.open(command, os.O_RDWR | os.O_CLOEXEC)
        reader = os.open(acknowledge, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._perf = self._start(call, "perf.log")
            os.write(writer, b"enable\n")
            if not self._wait(lambda: _is_readable(reader), self._perf):
                self._require_target()
                raise KsymError(
                    f"perf does not record: {_last_line(self.path('perf.log'))}",
                    "see what this user may do with: ksym doctor",
                )
        finally:
            os.close(writer)
            os.close(reader)

    def start_py_spy(self, is_starting: bool) -> None:
        """py-spy, sampling when this returns; tried again for a process that just starts."""
        self.session.clocks.append(_clocks())
        until = time.monotonic() + (_PATIENCE_SECONDS if is_starting else 0)
        while not self._try_py_spy():
            if time.monotonic() >= until or not _is_there(self._pid):
                self._require_target()
                problem = _last_line(self.path(grafting.LOG)).rstrip(".")
                raise KsymError(
                    f"py-spy cannot sample process {self._pid}: {problem}",
                    "it needs root or CAP_SYS_PTRACE, and a Python that it knows",
                )
            time.sleep(_STEP_SECONDS)

    def _require_target(self) -> None:
        if not _is_there(self._pid):
            raise KsymError(
                f"process {self._pid} has ended before it could be sampled",
                "sample one that runs longer",
            )

    def _try_py_spy(self) -> bool:
        how = self._how
        call = [py_spy(), "record", "-p", str(self._pid), "-r", str(how.rate), "-d", _FOR_EVER]
        call += ["-f", "chrometrace" if how.nonblocking else "speedscope"]
        call += ["--idle", "--threads", "--full-filenames", "-o", self.path(grafting.PYSPY)]
        call += ["--nonblocking"] if how.nonblocking else []
        call += ["--native"] if how.native else []
        call += ["--subprocesses"] if how.subprocesses else []
        self._py_spy = self._start(call, grafting.LOG, "py_spy=info,remoteprocess=debug")
        return self._wait_for(grafting.LOG, _SAMPLING, self._py_spy)

    def run(self, seconds: float | None) -> bool:
        """Sample for so long, until a signal, or until the process is gone: True if it is."""
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or time.monotonic() < until:
            self._note_threads()
            left = _STEP_SECONDS if until is None else min(_STEP_SECONDS, until - time.monotonic())
            select.select([self._signals.fd], [], [], max(0.0, left))
            if self._signals.take() & _STOPS:
                return False
            children = (self._perf, self._py_spy)
            if any(child is None or child.poll() is not None for child in children):
                return True
            if self._is_stuck():
                say(
                    "py-spy can no longer stop the process, and may be holding some of its"
                    " threads: it is ended"
                )
                return True
        return False

    def _is_stuck(self) -> bool:
        """Whether py-spy does nothing any more but fail."""
        with open(self.path(grafting.LOG), "rb") as file:
            file.seek(max(0, os.path.getsize(file.fileno()) - _TAIL))
            lines = file.read().splitlines()[1:]
        return len(lines) > _FAILURES and all(_FAILED in line for line in lines[-_FAILURES:])

    def stop(self) -> None:
        """Have all write what they have. KsymError if py-spy or perf failed."""
        self._end(self._py_spy, signal.SIGINT)
        self.session.clocks.append(_clocks())
        self._end(self._perf, signal.SIGINT)
        self._end(self._recorder, signal.SIGTERM)
        self.session.save(self.path(grafting.SESSION))
        if not os.path.exists(self.path(grafting.PYSPY)):
            problem = _last_line(self.path(grafting.LOG))
            raise KsymError(f"py-spy wrote nothing: {problem}", "record for longer")
        if self._perf is not None and self._perf.returncode not in (0, -signal.SIGINT, 130):
            raise KsymError(
                f"perf failed: {_last_line(self.path('perf.log'))}",
                "see what this user may do with: ksym doctor",
            )

    def _note_threads(self) -> None:
        """In a PID namespace threads have other ids to py-spy than to perf."""
        pids: Iterable[int] = family(self._pid) if self._how.subprocesses else (self._pid,)
        for pid in pids:
            if len(_status(pid, str(pid), "NSpid")) < 2:
                continue
            with contextlib.suppress(OSError):
                for tid in os.listdir(f"/proc/{pid}/task"):
                    ids = _status(pid, tid, "NSpid")
                    if len(ids) > 1:
                        self.session.outer[int(ids[-1])] = int(ids[0])

    def _start(self, call: list[str], log: str, rust_log: str = "") -> subprocess.Popen[bytes]:
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        if rust_log:
            environment["RUST_LOG"] = rust_log
        with open(self.path(log), "wb") as file:
            try:
                # A session of its own: a terminal's Ctrl-C is for this process to pass on.
                return subprocess.Popen(
                    call,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,  # noqa: PLW1509 - there are none
                    env=environment,
                )
            except OSError as error:
                raise KsymError(
                    f"{call[0]} cannot be run ({error.strerror})", "install it"
                ) from error

    def _wait_for(self, log: str, said: bytes, child: subprocess.Popen[bytes]) -> bool:
        def is_said() -> bool:
            with open(self.path(log), "rb") as file:
                return said in file.read()

        return self._wait(is_said, child) or is_said()

    def _wait(self, is_so: Callable[[], bool], child: subprocess.Popen[bytes]) -> bool:
        """Wait until it is so; False if the child ended, or it takes too long."""
        until = time.monotonic() + _START_SECONDS
        while not is_so():
            if child.poll() is not None:
                return False
            if time.monotonic() > until:
                child.kill()
                return False
            time.sleep(0.01)
        return True

    @staticmethod
    def _end(child: subprocess.Popen[bytes] | None, number: int) -> None:
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(number)
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def _clocks() -> tuple[int, int]:
    """UTC and CLOCK_MONOTONIC in ns; the closest together of a few pairs."""
    pairs = []
    for _ in range(5):
        before = time.monotonic_ns()
        utc = time.time_ns()
        after = time.monotonic_ns()
        pairs.append((after - before, utc, (before + after) // 2))
    _, utc, monotonic = min(pairs)
    return utc, monotonic


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _last_line(path: str) -> str:
    """What a child said went wrong: its first error, else its last word."""
    with open(path, "rb") as file:
        lines = file.read().decode(errors="replace").splitlines()
    told = [line.strip() for line in lines if line.strip() and not line.startswith(("[", " "))]
    errors = [line.partition("Error: ")[2] for line in told if line.startswith("Error: ")]
    return (errors or told[-1:] or ["it said nothing"])[0]
