"""What py-spy and perf write of a run: py-spy's speedscope file, its log, perf script's text.

The speedscope file has one entry a sample, in the order of time, but no times. With
``--threads`` each begins with the frame ``thread (TID): NAME``; with ``--subprocesses`` there
are frames ``process PID:"COMMAND"`` before it. There is a profile for each pthread id, which
several short-lived threads may have had: so a profile's name counts only where there is no such
frame. Frames are functions, without lines: between two samples the line changes nearly always,
the function seldom.

Under ``RUST_LOG=py_spy=info,remoteprocess=debug`` py-spy logs when it stops each thread for
a sample, and when it lets it go::

    [2026-11-30T02:40:46.372274092Z DEBUG remoteprocess::linux] attached to thread 4711
    [2026-11-30T02:40:46.372531011Z DEBUG remoteprocess::linux] detached from thread 4711

py-spy promises nothing about these lines; they are the same from 0.3.14 to 0.4.3. So a log
is used only as far as it fits the samples in number.

perf's text is printed with ``--ns --header`` of what was recorded with ``-k CLOCK_MONOTONIC``.
Its header also tells how far UTC, py-spy's clock, is from that.
"""

from __future__ import annotations

import calendar
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.perf.fold import FoldOptions, format_frame, format_task
from ksym_plugin.perf.repaint import Renamer, StackReader, renamed
from ksym_plugin.stacks.names import for_stacks
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from typing import Any

    from ksym_plugin.perf.namer import Decision
    from ksym_plugin.perf.text import FrameLine, Header

#: How to record what can be grafted.
AGAIN = "record again with: ksym pyspy record"
#: The versions whose log is known to have those lines.
TRIED = ("0.3.14", "0.4.0", "0.4.1", "0.4.3")

#: No id has more digits.
_ID = r"(0x[0-9a-fA-F]{1,16}|\d{1,20})"
_THREAD = re.compile(rf"thread \({_ID}\)(?:: .*)?\Z", re.DOTALL)
_PROCESS = re.compile(r"process (\d{1,20}):\"", re.DOTALL)
_PROFILE = re.compile(rf"(?:Process (\d{{1,20}}) )?Thread {_ID} \".*\"\Z", re.DOTALL)
_EXPORTER = re.compile(r"py-spy@(\S+)")
_SHARED_OBJECT = re.compile(r"\.so(?:\.[0-9.]+)?\Z")
_PYTHON_FILE = (".py", ".pyw", ".pyx", ".pyi", ".ipynb")

_LINE = re.compile(
    rb"\[(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)\.(\d{1,9})Z +\S+ +\S+\] (.*)", re.DOTALL
)
_LOCK = re.compile(rb"(attached to|detached from) thread (\d{1,10})\s*\Z")
_SETTING = re.compile(rb"\s+([a-z_]+): (\S+),\s*\Z")
_ERRORS = re.compile(rb"Samples: \d{1,18} Errors: (\d{1,18})")
#: Logged for each sample that failed; the total comes at the end, on stdout.
_FAILED = b"Failed to get stack trace from"
_EXITED = b"Stopped sampling because process exited"
_NAMES = b"looking up thread names"
_SECOND = 1_000_000_000

#: In what perf script prints for ``--header``.
_CLOCKID = re.compile(rb"# event : .*use_clockid = 1.*clockid = (-?\d+)")
_REFERENCE = re.compile(
    rb"# reference time: .* = (\d+)\.(\d+) \(TOD\) = (\d+)\.(\d+) \(monotonic\)"
)
_MONOTONIC = b"1"
_OPTIONS = FoldOptions(kernel=True, bpf=True)
#: Where a thread is while py-spy has it stopped (kernel/signal.c).
_STOPPED = re.compile(rb"ptrace_stop|ptrace_do_notify|ptrace_notify|do_jobctl_trap")
_LONGEST_ID = 10


class Stack:
    """A stack, root first, of frames as folded stacks write them.

    ``python`` are its Python functions. ``frames`` are native ones too, each with whether it
    is a Python function.
    """

    def __init__(self, frames: Iterable[tuple[str, bool]]) -> None:
        self.frames = tuple(frames)
        self.python = tuple(text for text, is_python in self.frames if is_python)


@dataclass
class Thread:
    """The samples of one thread in order; ``pid`` is None if the file has none."""

    pid: int | None
    samples: list[Stack] = field(default_factory=list)
    #: False if they come from several profiles, whose order is not known.
    in_order: bool = True


@dataclass
class Profile:
    """A py-spy recording: its threads by their ids, and py-spy's version if it is known."""

    version: str
    threads: dict[int, Thread] = field(default_factory=dict)


def load(text: bytes) -> Profile:
    """The samples of a speedscope file that py-spy wrote. KsymError for any other file."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise KsymError(
            "the py-spy file is no JSON; the raw format tells no order of time and cannot be used",
            "record with: py-spy record -f speedscope",
        ) from None
    try:
        return _Reader(document).profile
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        raise KsymError("this is no speedscope file of py-spy's", AGAIN) from None


def _thread_id(digits: str) -> int:
    if digits.startswith("0x"):
        raise KsymError(
            "py-spy has only pthread ids of the threads, which perf does not know",
            "record without --nonblocking; in a container, with Python 3.11 or later",
        )
    return int(digits)


def function_frame(name: str, file: str) -> str:
    """A Python function as folded stacks write it; its file marks it as one of Python's."""
    name, file = for_stacks(name), for_stacks(file)
    if file.endswith(".py") or file.startswith("<"):
        return f"{name} ({file})"
    # A script may have any name. CPython writes functions like this for perf.
    return f"py::{name}:{file}"


class _Reader:
    """Reads a document into ``profile``."""

    def __init__(self, document: Any) -> None:  # noqa: ANN401 - JSON of any shape
        exporter = _EXPORTER.match(str(document.get("exporter")))
        self.profile = Profile(exporter[1] if exporter else "")
        self._table: list[dict[str, Any]] = document["shared"]["frames"]
        self._has_native = any(
            _SHARED_OBJECT.search(str(frame.get("file") or "")) for frame in self._table
        )
        self._frames = [self._frame(frame) for frame in self._table]
        self._parsed: dict[tuple[int, ...], tuple[int | None, int | None, Stack]] = {}
        for profile in document["profiles"]:
            self._read(profile["name"], profile["samples"])

    def _read(self, title: str, samples: Iterable[Sequence[int]]) -> None:
        named = _PROFILE.match(title)
        here: set[int] = set()
        for numbers in samples:
            key = tuple(numbers)
            if key not in self._parsed:
                self._parsed[key] = self._sample(key)
            pid, tid, stack = self._parsed[key]
            if tid is None:
                if named is None:
                    raise ValueError(title)
                pid = pid or (int(named[1]) if named[1] else None)
                tid = _thread_id(named[2])
            thread = self.profile.threads.setdefault(tid, Thread(pid))
            if thread.samples and tid not in here:
                thread.in_order = False
            here.add(tid)
            thread.samples.append(stack)

    def _sample(self, numbers: tuple[int, ...]) -> tuple[int | None, int | None, Stack]:
        """A process and a thread, as far as the first frames name them, and the other frames."""
        if any(number < 0 for number in numbers):
            raise ValueError(numbers)
        pid: int | None = None
        for at, number in enumerate(numbers):
            name = str(self._table[number]["name"])
            process = _PROCESS.match(name)
            if process is not None:
                pid = int(process[1])
                continue
            thread = _THREAD.match(name)
            tid = None if thread is None else _thread_id(thread[1])
            rest = numbers[at if thread is None else at + 1 :]
            return pid, tid, Stack(self._frames[n] for n in rest)
        return pid, None, Stack(())

    def _frame(self, frame: dict[str, Any]) -> tuple[str, bool]:
        name, file = str(frame["name"]), str(frame.get("file") or "")
        if not self._has_native or file.endswith(_PYTHON_FILE) or file[:1] == "<":
            return function_frame(name, file), True
        if name.startswith("0x"):  # An address without a symbol: it differs in each process.
            name = f"[{file.rpartition('/')[2]}]"
        return for_stacks(name), False


@dataclass
class Round:
    """One sample of a process: when its threads were stopped and let go, in ns of UTC.

    ``at`` is when the last one was stopped, which is when py-spy begins to read stacks.
    """

    began: int
    at: int
    ended: int
    tids: list[int] = field(default_factory=list)


@dataclass
class Log:
    """What a log holds; times are ns of UTC."""

    #: Time, thread, and whether it was stopped (else let go), in order.
    locks: list[tuple[int, int, bool]] = field(default_factory=list)
    #: When py-spy looked up names of threads: in a process's first round, and for new ones.
    named: list[int] = field(default_factory=list)
    #: How many samples failed.
    errors: int = 0
    #: Whether py-spy ended because the process did.
    exited: bool = False
    #: py-spy's options as it prints them, as ``gil_only`` = ``false``; not all are printed.
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def tids(self) -> set[int]:
        return {tid for _, tid, _ in self.locks}


def parse_log(lines: Iterable[bytes]) -> Log:
    """Read a log; lines that are none of those expected are passed over."""
    log = Log()
    for line in lines:
        found = _LINE.match(line)
        if found is not None:
            message = found[8]
            lock = _LOCK.match(message)
            if lock is not None:
                is_stop = lock[1] == b"attached to"
                log.locks.append((_time(found), int(lock[2]), is_stop))
            elif message.startswith(_NAMES):
                log.named.append(_time(found))
            elif message.startswith(_FAILED):
                log.errors += 1
            continue
        setting = _SETTING.match(line)
        if setting is not None:
            log.settings[setting[1].decode()] = setting[2].decode("ascii", "replace")
        log.exited = log.exited or _EXITED in line
        errors = _ERRORS.search(line)
        if errors is not None:
            log.errors = max(log.errors, int(errors[1]))
    return log


def _time(found: re.Match[bytes]) -> int:
    *parts, fraction = (found[number] for number in range(1, 8))
    seconds = calendar.timegm((*map(int, parts), 0, 0, 0))
    return seconds * _SECOND + int(fraction.ljust(9, b"0"))


def rounds(log: Log, tids: Collection[int] | None = None) -> list[Round]:
    """The rounds of the process with these threads; None if there is only one process.

    py-spy stops all threads of a process, reads them, and lets all go. It reads several
    processes at the same time, so each has rounds of its own.
    """
    found: list[Round] = []
    is_over = True
    for time, tid, is_stop in log.locks:
        if tids is not None and tid not in tids:
            continue
        if not is_stop:
            if found:
                found[-1].ended = time
            is_over = True
            continue
        if is_over:
            found.append(Round(time, time, time))
            is_over = False
        found[-1].at = found[-1].ended = time
        found[-1].tids.append(tid)
    return found


def starting(log: Log, found: list[Round], is_alone: bool) -> int:
    """How many of a process's first rounds gave no sample, as py-spy only looked at it.

    In the last of them it looks up the names of threads for the first time; if it reads
    several processes, the log does not say for which.
    """
    if not is_alone or not log.named:
        return min(1, len(found))
    return max(1, sum(round.began <= log.named[0] for round in found)) if found else 0


class Hit(NamedTuple):
    """A sample of perf: its thread, time (CLOCK_MONOTONIC ns) and kernel frames, root first.

    ``is_stopped`` if py-spy had the thread stopped: then the frames are of that stop.
    """

    comm: str
    pid: int
    tid: int
    time: int
    kernel: tuple[str, ...]
    is_stopped: bool


class PerfReader(StackReader):
    """Reads text into hits; ``is_monotonic`` and ``shift`` are set once its header is read.

    Only samples of the first event are taken. ``passed_over`` were of others, or have no
    thread or no time.
    """

    def __init__(self, renamer: Renamer | None = None) -> None:
        super().__init__(renamer or Renamer())
        self.is_monotonic: bool | None = None
        #: What to add to ns of UTC for CLOCK_MONOTONIC.
        self.shift: int | None = None
        self.passed_over = 0
        self._event: bytes | None = None
        self._hits: list[Hit] = []

    def hits(self, pieces: Iterable[bytes]) -> Iterator[Hit]:
        """The samples of a text that comes in pieces."""
        for piece in pieces:
            self.read(piece)
            yield from self._hits
            self._hits.clear()
        self.end()
        yield from self._hits

    def _outside(self, line: bytes) -> None:
        if self._event is not None:
            return
        clock = _CLOCKID.match(line)
        if line.startswith(b"# event : "):
            is_monotonic = clock is not None and clock[1] == _MONOTONIC
            self.is_monotonic = is_monotonic and self.is_monotonic is not False
        reference = _REFERENCE.match(line)
        if reference is not None:
            utc, monotonic = (
                int(reference[at]) * _SECOND + int(reference[at + 1].ljust(9, b"0")[:9])
                for at in (1, 3)
            )
            self.shift = monotonic - utc

    def _user(self, _line: bytes, _frame: FrameLine) -> None:
        return None

    def _kernel(
        self, _line: bytes, frame: FrameLine, decision: Decision, dso: str, _is_leaf: bool
    ) -> tuple[str, bool] | None:
        """A kernel frame, and whether it is in a stop."""
        frame = renamed(frame, decision, dso)
        name = format_frame(frame, _OPTIONS)
        if name is None:
            return None
        return name.decode("utf-8", "surrogateescape"), _STOPPED.fullmatch(frame.name) is not None

    def _join(self, pieces: list[tuple[str, bool] | None]) -> tuple[tuple[str, ...], bool]:
        kernel = [piece for piece in reversed(pieces) if piece is not None]
        return tuple(name for name, _ in kernel), any(is_stop for _, is_stop in kernel)

    def _sample(self, header: Header, stack: tuple[tuple[str, ...], bool], line: bytes) -> None:
        self._event = self._event or header.event
        window = header.window(line)
        has_thread = header.pid and len(header.tid) <= _LONGEST_ID
        if header.event != self._event or not has_thread or window is None:
            self.passed_over += 1
            return
        comm = format_task(header.comm).decode("utf-8", "surrogateescape")
        pid, tid = int(header.pid[:_LONGEST_ID]), int(header.tid)
        self._hits.append(Hit(comm, pid, tid, window[0], *stack))
