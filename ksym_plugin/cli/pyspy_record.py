"""Runs perf, py-spy and the recorder on one process, for ``ksym pyspy record``.

perf starts first and ends last, so that it has samples for all the time that py-spy has.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ksym_plugin.cli.output import say
from ksym_plugin.cli.signals import NOT_RUN, STOPS, Signals, not_run
from ksym_plugin.kernel import worker
from ksym_plugin.kernel.worker import Child, Forked
from ksym_plugin.python.pyspy import AGAIN
from ksym_plugin.timeline.errors import KsymError

#: Stopping more threads for each sample slows a process down (py-spy's issue 872).
_MANY_THREADS = 32
_LOW_RATE = 20
#: In the names of a process's files, its version of Python.
_PYTHON = re.compile(rb"(?:libpython|/python)(\d)\.(\d+)")
_STEP_SECONDS = 0.05
#: How long a command may take until it is a Python process.
_PYTHON_SECONDS = 5.0
#: Longer than anybody records: py-spy is ended by a signal.
_FOR_EVER = "999999"
#: Once py-spy has lost a thread it prints this over and over, and never recovers.
_FAILED = b"Failed to suspend process"
_FAILURES = 30
_TAIL = 1 << 13
#: How long it may then take to write its file, as it may have the process stopped.
_STUCK_SECONDS = 5.0
#: The files in the folder of ``ksym pyspy record --keep``.
PERF_DATA = "perf.data"
PYSPY = "pyspy.json"
LOG = "pyspy.log"
INFO = "session.json"
#: py-spy's times are UTC. If UTC is set by more ns than this, later samples have wrong times.
_CLOCK_STEP = 100_000
_ASK_DOCTOR = "see what this user may do with: ksym doctor"


class Command:
    """A process that executes ``call`` once it is let go; ``pid`` stays the same.

    Leaving the context waits for its end, also after an error: the command is the user's,
    and the error is none of its own. A process that was never let go ends at once. Signals
    are passed on meanwhile.
    """

    def __init__(self, call: Sequence[str], signals: Signals) -> None:
        self._name = call[0]
        self._signals = signals
        go, self._go = os.pipe()
        try:
            self.pid = os.fork()
            if not self.pid:
                os.close(self._go)
                _execute(call, go)
            self._process = Forked(self.pid)
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
        """Have it execute the command; when this returns it has, or has ended."""
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
        return self._signals.wait(self._process)

    def _is_over(self) -> bool:
        return self._process.poll() is not None


def _execute(call: Sequence[str], go: int) -> None:
    """Wait for a byte, then execute the command in this process; never returns."""
    status = NOT_RUN
    try:
        if os.read(go, 1):
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.execvp(call[0], list(call))  # noqa: S606 - the user's own; no shell between
    except OSError as error:
        status = not_run(call[0], error)
    finally:
        os._exit(status)


def suggest_perf_support(pid: int) -> None:
    """Say what is better than this, if a process runs a Python that can do it."""
    found = _PYTHON.search(worker.mapped_files(pid))
    if found is not None and (int(found[1]), int(found[2])) >= (3, 12):
        version = b".".join(found.groups()).decode()
        say(
            f"this is Python {version}: started with python -X perf, perf sees its"
            " functions itself, exactly (perf record -k CLOCK_MONOTONIC --call-graph dwarf, then"
            " ksym script); what follows is an approximation"
        )


def require_fit(pid: int, rate: int) -> None:
    """KsymError if a process does not exist, is being traced, or would be slowed down."""
    tids = worker.thread_ids(pid)
    if not tids:
        raise KsymError(f"there is no process {pid}", "name one that runs")
    statuses = map(worker.thread_status, tids)
    tracers = {tracer for status in statuses for tracer in status.get("TracerPid", ())} - {"0"}
    if tracers:
        raise KsymError(
            f"process {pid} is held by process {min(tracers)}, a debugger or tracer, and there"
            " can be only one",
            "end that one first",
        )
    if len(tids) > _MANY_THREADS and rate > _LOW_RATE:
        raise KsymError(
            f"process {pid} has {len(tids)} threads, and py-spy would stop each of them"
            f" {rate} times a second",
            f"use --rate {_LOW_RATE} or less",
        )


def outer_ids(pids: Iterable[int]) -> dict[int, int]:
    """The ids of threads in this PID namespace, by their ids in one of their own."""
    inside = [pid for pid in pids if len(_namespace_ids(pid)) > 1]
    found = [_namespace_ids(tid) for pid in inside for tid in worker.thread_ids(pid)]
    return {int(ids[-1]): int(ids[0]) for ids in found if len(ids) > 1}


def _namespace_ids(tid: int) -> list[str]:
    """A thread's ids, the one in this PID namespace first; none if it is gone."""
    return worker.thread_status(tid).get("NSpid", [])


def is_running(pid: int) -> bool:
    return worker.thread_status(pid).get("State", ["X"])[0] not in ("Z", "X")


@dataclass
class RecordingInfo:
    """What is known of a recording besides its files.

    ``clocks`` are pairs of UTC and CLOCK_MONOTONIC in ns, read before and after it.
    ``outer`` maps ids of threads in a PID namespace to the host's. ``rate`` is the one that
    py-spy was asked for.
    """

    clocks: list[tuple[int, int]] = field(default_factory=list)
    outer: dict[int, int] = field(default_factory=dict)
    rate: float | None = None

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(vars(self), file)

    def shift(self) -> int | None:
        """What to add to UTC for CLOCK_MONOTONIC; KsymError if UTC was set meanwhile."""
        shifts = [monotonic - utc for utc, monotonic in self.clocks]
        if not shifts:
            return None
        if max(shifts) - min(shifts) > _CLOCK_STEP:
            raise KsymError("the clock was set during the recording, which cannot be undone", AGAIN)
        return shifts[0]


def load_info(path: str) -> RecordingInfo:
    """Read what ``save`` has written. KsymError for any other file."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        return RecordingInfo(
            [(int(utc), int(monotonic)) for utc, monotonic in document["clocks"]],
            {int(inner): int(outer) for inner, outer in document["outer"].items()},
            None if document["rate"] is None else float(document["rate"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise KsymError(f"{path} is no session of ksym pyspy record", AGAIN) from None


class SamplingOptions(NamedTuple):
    """Both samplers' rates in samples a second, perf's event, and py-spy's modes."""

    rate: int
    frequency: int
    event: str
    native: bool
    subprocesses: bool


def py_spy() -> str:
    """The py-spy to run. KsymError if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    found = shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)
    if found is None:
        raise KsymError("py-spy is not installed", "install it: pip install py-spy")
    return found


class Sampling(contextlib.ExitStack):
    """One recording, in ``folder``; leaving the context ends what it has started.

    The recorder is started first, if at all, then perf, then py-spy; then ``run``, ``stop``.
    """

    def __init__(self, folder: str, pid: int, options: SamplingOptions, signals: Signals) -> None:
        super().__init__()
        self._folder = folder
        self.info = RecordingInfo(rate=options.rate)
        self._pid = pid
        self._options = options
        self._signals = signals
        self._perf: Child
        self._py_spy: Child
        self._recorder: Child | None = None

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _start(self, call: Sequence[str], log: str, **environment: str) -> Child:
        child = Child(call, self.path(log), environment)
        # In the end py-spy goes first: it may have the process stopped.
        self.callback(child.kill)
        return child

    def _pids(self) -> list[int]:
        return worker.family(self._pid) if self._options.subprocesses else [self._pid]

    def start_recorder(self, history: str) -> None:
        """Record BPF symbols into ``history``; if that cannot be done, a message says so."""
        # Under -I, with this process's path: no modules of the working directory.
        code = f"import sys; sys.path[:] = {sys.path!r}; from ksym_plugin.cli import main; main()"
        call = [sys.executable, "-I", "-c", code, "record", "-o", history]
        self._recorder = self._start(call, "recorder.log")
        if not self._recorder.wait_for(b"recording with"):
            say(f"BPF symbols are not recorded: {self._recorder.problem()}")
            self._recorder = None

    def start_perf(self) -> None:
        """Start perf and wait until it records. KsymError if it does not."""
        options, command, acknowledge = self._options, self.path("control"), self.path("ack")
        call = ["perf", "record", "-e", options.event, "-F", str(options.frequency), "-g"]
        call += ["--kernel-callchains", "-k", "CLOCK_MONOTONIC", "-D", "-1"]
        # Else perf first lists all programs, which takes a minute for ten thousand.
        call += ["--no-bpf-event"] if self._recorder is not None else []
        call += [f"--control=fifo:{command},{acknowledge}", "-o", self.path(PERF_DATA)]
        call += ["-p", ",".join(map(str, self._pids()))]
        with contextlib.ExitStack() as stack:
            writer, reader = (_fifo(path, stack) for path in (command, acknowledge))
            self._perf = self._start(call, "perf.log")
            os.write(writer, b"enable\n")
            if not self._perf.wait_until(lambda: bool(select.select([reader], [], [], 0)[0])):
                self._require_target()
                raise KsymError(f"perf does not record: {self._perf.problem()}", _ASK_DOCTOR)

    def start_py_spy(self, is_starting: bool) -> None:
        """Start py-spy and wait until it samples; try again while a process is starting."""
        rate, _, _, native, subprocesses = self._options
        call = [py_spy(), "record", "-p", str(self._pid), "-r", str(rate), "-d", _FOR_EVER]
        call += ["-f", "speedscope", "--idle", "--threads", "--full-filenames"]
        call += ["--native"] if native else []
        call += ["--subprocesses"] if subprocesses else []
        call += ["-o", self.path(PYSPY)]
        self.info.clocks.append(_clocks())
        until = time.monotonic() + (_PYTHON_SECONDS if is_starting else 0)
        while True:
            self._py_spy = self._start(call, LOG, RUST_LOG="py_spy=info,remoteprocess=debug")
            if self._py_spy.wait_for(b"Sampling process"):
                return
            if time.monotonic() >= until or not is_running(self._pid):
                self._require_target()
                problem = self._py_spy.problem().rstrip(".")
                raise KsymError(
                    f"py-spy cannot sample process {self._pid}: {problem}",
                    "it needs root or CAP_SYS_PTRACE, and a Python that it knows",
                )
            time.sleep(_STEP_SECONDS)

    def _require_target(self) -> None:
        if not is_running(self._pid):
            raise KsymError(
                f"process {self._pid} has ended before it could be sampled",
                "sample one that runs longer",
            )

    def run(self, seconds: float | None) -> bool:
        """Sample until the time is up, a signal comes, or perf or py-spy ends.

        Returns whether the process may go on: False after the time and after a signal.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.info.outer.update(outer_ids(self._pids()))
            select.select([self._signals.fd], [], [], min(_STEP_SECONDS, left))
            if self._signals.take() & STOPS:
                return False
            is_over = self._perf.status is not None or self._py_spy.status is not None
            if is_over or self._end_stuck():
                return True
        return False

    def _end_stuck(self) -> bool:
        """End py-spy if all it does any more is to fail; True if that was so."""
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
        """End the samplers and the recorder, which then write their files."""
        self._py_spy.end(signal.SIGINT)
        self.info.clocks.append(_clocks())
        self._perf.end(signal.SIGINT)
        if self._recorder is not None:
            was_running = self._recorder.status is None
            self._recorder.end(signal.SIGTERM)
            if not was_running or self._recorder.status:
                say(f"BPF symbols are not recorded to the end: {self._recorder.problem()}")
        self.info.save(self.path(INFO))

    def require_results(self) -> None:
        """KsymError if py-spy or perf failed."""
        if not os.path.exists(self.path(PYSPY)):
            problem = self._py_spy.problem()
            raise KsymError(f"py-spy wrote nothing: {problem}", "record for longer")
        if self._perf.status not in (0, -signal.SIGINT, 130):
            raise KsymError(f"perf failed: {self._perf.problem()}", _ASK_DOCTOR)


def _fifo(path: str, stack: contextlib.ExitStack) -> int:
    """A new fifo, open at both ends so that opening it never waits; ``stack`` removes it."""
    os.mkfifo(path, 0o600)
    stack.callback(os.unlink, path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _clocks() -> tuple[int, int]:
    """UTC and CLOCK_MONOTONIC in ns, of a few pairs the one read in the shortest time."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    before, utc, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return utc, (before + after) // 2
