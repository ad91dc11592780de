"""perf, py-spy and the recorder at work on one process: for ``ksym pyspy record``.

perf starts first and ends last, so that what py-spy saw lies within what perf saw.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

from ksym_plugin.cli import grafting
from ksym_plugin.cli.grafting import Session
from ksym_plugin.cli.output import say
from ksym_plugin.cli.sampled import STOPS, family, is_there, outer_ids
from ksym_plugin.kernel.worker import Child
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.cli.stopping import Signals

_STEP_SECONDS: Final = 0.05
#: How long a command may take until it is a Python process.
_PATIENCE_SECONDS: Final = 5.0
#: Longer than anybody records: py-spy counts samples, and is told to stop.
_FOR_EVER: Final = "999999"
#: What py-spy says, over and over, once it has lost a thread; it then never recovers.
_FAILED: Final = b"Failed to suspend process"
_FAILURES: Final = 30
_TAIL: Final = 1 << 13
#: How long it may then take to write what it has, while it may hold the process.
_STUCK_SECONDS: Final = 5.0
_SAMPLING: Final = b"Sampling process"
_PERF_LOG: Final = "perf.log"
_RECORDER_LOG: Final = "recorder.log"


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


class Sampling:
    """One recording, in ``folder``; from entering to leaving its children run."""

    def __init__(self, folder: str, pid: int, how: How, signals: Signals) -> None:
        self.folder = folder
        self.session = Session()
        self.session.rate = how.rate
        self._pid = pid
        self._how = how
        self._signals = signals
        self._perf: Child | None = None
        self._py_spy: Child | None = None
        self._recorder: Child | None = None

    def __enter__(self) -> Sampling:
        return self

    def __exit__(self, *_: object) -> None:
        for child in (self._py_spy, self._perf, self._recorder):
            if child is not None:
                child.kill()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def start_recorder(self, history: str) -> None:
        """Follow BPF symbols into ``history``; what keeps it from that is said, not raised."""
        # Modules from where this process has them, and none of the working directory's.
        code = f"import sys; sys.path[:] = {sys.path!r}; from ksym_plugin.cli import main; main()"
        call = [sys.executable, "-I", "-c", code, "record", "-o", history]
        self._recorder = Child(call, self.path(_RECORDER_LOG))
        if not self._recorder.wait_for(b"recording with"):
            say(f"BPF symbols are not recorded: {self._recorder.problem()}")
            self._recorder = None

    def start_perf(self) -> None:
        """perf, recording when this returns. KsymError if it does not."""
        how, command, acknowledge = self._how, self.path("control"), self.path("ack")
        pids = family(self._pid) if how.subprocesses else [self._pid]
        call = ["perf", "record", "-e", how.event, "-F", str(how.frequency), "-g"]
        call += ["--kernel-callchains", "-k", "CLOCK_MONOTONIC", "-D", "-1"]
        # perf would first list all programs, which takes it a minute with ten thousand.
        call += ["--no-bpf-event"] if self._recorder is not None else []
        call += [f"--control=fifo:{command},{acknowledge}", "-o", self.path(grafting.PERF_DATA)]
        call += ["-p", ",".join(map(str, pids))]
        with contextlib.ExitStack() as stack:
            writer, reader = (_fifo(path, stack) for path in (command, acknowledge))
            self._perf = Child(call, self.path(_PERF_LOG))
            os.write(writer, b"enable\n")
            if not self._perf.wait_until(lambda: _is_readable(reader)):
                self._require_target()
                raise KsymError(
                    f"perf does not record: {self._perf.problem()}",
                    "see what this user may do with: ksym doctor",
                )

    def start_py_spy(self, is_starting: bool) -> None:
        """py-spy, sampling when this returns; tried again for a process that just starts."""
        self.session.clocks.append(_clocks())
        until = time.monotonic() + (_PATIENCE_SECONDS if is_starting else 0)
        while True:
            self._py_spy = child = self._call_py_spy()
            if child.wait_for(_SAMPLING):
                return
            if time.monotonic() >= until or not is_there(self._pid):
                self._require_target()
                raise KsymError(
                    f"py-spy cannot sample process {self._pid}: {child.problem().rstrip('.')}",
                    "it needs root or CAP_SYS_PTRACE, and a Python that it knows",
                )
            time.sleep(_STEP_SECONDS)

    def _require_target(self) -> None:
        if not is_there(self._pid):
            raise KsymError(
                f"process {self._pid} has ended before it could be sampled",
                "sample one that runs longer",
            )

    def _call_py_spy(self) -> Child:
        how = self._how
        call = [py_spy(), "record", "-p", str(self._pid), "-r", str(how.rate), "-d", _FOR_EVER]
        call += ["-f", "chrometrace" if how.nonblocking else "speedscope"]
        call += ["--idle", "--threads", "--full-filenames", "-o", self.path(grafting.PYSPY)]
        call += ["--nonblocking"] if how.nonblocking else []
        call += ["--native"] if how.native else []
        call += ["--subprocesses"] if how.subprocesses else []
        environment = {"RUST_LOG": "py_spy=info,remoteprocess=debug"}
        return Child(call, self.path(grafting.LOG), environment)

    def run(self, seconds: float | None) -> bool:
        """Sample for so long, until a signal, or until the process is gone or no longer seen.

        Whether it is to go on: False if the time is up, or a signal came.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or time.monotonic() < until:
            pids = family(self._pid) if self._how.subprocesses else (self._pid,)
            self.session.outer.update(outer_ids(pids))
            left = _STEP_SECONDS if until is None else min(_STEP_SECONDS, until - time.monotonic())
            select.select([self._signals.fd], [], [], max(0.0, left))
            if self._signals.take() & STOPS:
                return False
            children = (self._perf, self._py_spy)
            if any(child is None or child.status is not None for child in children):
                return True
            if self._end_stuck():
                return True
        return False

    def _end_stuck(self) -> bool:
        """End py-spy if it does nothing any more but fail; whether it did."""
        if self._py_spy is None:
            return False
        lines = self._py_spy.last_lines(_TAIL)
        if len(lines) <= _FAILURES or not all(_FAILED in line for line in lines[-_FAILURES:]):
            return False
        say(
            "py-spy can no longer stop the process, and may be holding some of its"
            " threads: it is ended"
        )
        self._py_spy.end(signal.SIGINT, _STUCK_SECONDS)
        return True

    def stop(self) -> None:
        """Have all write what they have."""
        _end(self._py_spy, signal.SIGINT)
        self.session.clocks.append(_clocks())
        _end(self._perf, signal.SIGINT)
        if self._recorder is not None:
            was_at_work = self._recorder.status is None
            self._recorder.end(signal.SIGTERM)
            if not was_at_work or self._recorder.status:
                say(f"BPF symbols are not recorded to the end: {self._recorder.problem()}")
        self.session.save(self.path(grafting.SESSION))

    def require_results(self) -> None:
        """KsymError if py-spy or perf failed."""
        if self._py_spy is not None and not os.path.exists(self.path(grafting.PYSPY)):
            problem = self._py_spy.problem()
            raise KsymError(f"py-spy wrote nothing: {problem}", "record for longer")
        if self._perf is not None and self._perf.status not in (0, -signal.SIGINT, 130):
            raise KsymError(
                f"perf failed: {self._perf.problem()}",
                "see what this user may do with: ksym doctor",
            )


def _fifo(path: str, stack: contextlib.ExitStack) -> int:
    """A new fifo, open at both ends so that nobody waits for the other; gone with ``stack``."""
    os.mkfifo(path, 0o600)
    stack.callback(os.unlink, path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _end(child: Child | None, number: int) -> None:
    if child is not None:
        child.end(number)


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
