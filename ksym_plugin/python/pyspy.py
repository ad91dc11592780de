"""What py-spy writes: the stacks of a speedscope file, and what its thread names say.

A speedscope file of py-spy has one entry a sample, in the order of time, but no time.
With ``--threads`` each begins with the frame ``thread (TID): NAME``, behind
``process PID:"COMMAND"`` frames with ``--subprocesses``. The profiles themselves are kept
by pthread id, which short-lived threads share: so the frame is believed, the name of the
profile only where there is no frame.

Frames are functions: between two samples the line has moved on, the function mostly not.
"""

from __future__ import annotations

import json
import re

from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Final

#: How to record what can be grafted.
AGAIN: Final = "record again with: ksym pyspy record"

_THREAD: Final = re.compile(r"thread \((0x[0-9a-fA-F]+|\d+)\)(?:: (.*))?\Z", re.DOTALL)
_PROCESS: Final = re.compile(r"process (\d+):\"", re.DOTALL)
_PROFILE: Final = re.compile(
    r"(?:Process (\d+) )?Thread (0x[0-9a-fA-F]+|\d+) \"(.*)\"\Z", re.DOTALL
)
_EXPORTER: Final = re.compile(r"py-spy@(\S+)")
_SHARED_OBJECT: Final = re.compile(r"\.so(?:\.[0-9.]+)?\Z")
_PYTHON_FILE: Final = (".py", ".pyw", ".pyx", ".pyi", ".ipynb")
#: What would end a frame, or a line, of folded stacks.
_FOLDED: Final = {
    **dict.fromkeys((*range(0x20), 0x7F, *range(0x80, 0xA0), 0x2028, 0x2029), " "),
    ord(";"): ":",
}
#: Longer numbers than any thread's.
_LONGEST_ID: Final = 20


class Stack:
    """A stack, root first: its Python functions, and all of it with the native frames."""

    __slots__ = ("frames", "python")

    def __init__(self, frames: tuple[tuple[str, bool], ...]) -> None:
        #: Frames as they are spelled in folded stacks, and whether each is Python's.
        self.frames = frames
        self.python = tuple(text for text, is_python in frames if is_python)

    def __repr__(self) -> str:
        return f"Stack({';'.join(text for text, _ in self.frames)})"


class Thread:
    """The samples of one thread in order; ``pid`` is None where the file does not say."""

    __slots__ = ("in_order", "name", "pid", "samples", "tid")

    def __init__(self, tid: int, pid: int | None, name: str) -> None:
        self.tid = tid
        self.pid = pid
        self.name = name
        self.samples: list[Stack] = []
        #: False if they come from several profiles: which was first is not known.
        self.in_order = True


class Profile:
    """A py-spy recording: its threads by their ids, and py-spy's version if it tells."""

    __slots__ = ("has_native", "threads", "version")

    def __init__(self, version: str) -> None:
        self.version = version
        self.threads: dict[int, Thread] = {}
        self.has_native = False


class ThreadName:
    """``Process PID Thread TID "NAME"``; ``is_pthread`` if the id is no kernel's."""

    __slots__ = ("is_pthread", "name", "pid", "tid")

    def __init__(self, pid: int | None, tid: int, name: str, is_pthread: bool) -> None:
        self.pid = pid
        self.tid = tid
        self.name = name
        self.is_pthread = is_pthread


def load(text: bytes) -> object:
    """The JSON in a file of py-spy's. KsymError for anything else, as its raw format."""
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError):
        raise KsymError(
            "the py-spy file is no JSON; the raw format tells no order of time and cannot be used",
            "record with: py-spy record -f speedscope",
        ) from None
    return document


def parse(document: object) -> Profile:
    """The samples of a speedscope file that py-spy wrote. KsymError for any other."""
    try:
        return _Reader(document).profile
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        raise KsymError("this is no speedscope file of py-spy's", AGAIN) from None


def thread_name(title: str) -> ThreadName | None:
    """What the name of a profile says; None if it is none of py-spy's."""
    found = _PROFILE.match(title)
    if found is None:
        return None
    pid, tid, name = found.groups()
    is_pthread, number = _thread_id(tid)
    return ThreadName(None if pid is None else int(pid), number, _unquoted(name), is_pthread)


def thread_of(frame: str) -> ThreadName | None:
    """The thread that a frame of ``--threads`` stands for; None for any other frame."""
    found = _THREAD.match(frame)
    if found is None:
        return None
    is_pthread, tid = _thread_id(found[1])
    return ThreadName(None, tid, found[2] or "", is_pthread)


def _unquoted(name: str) -> str:
    return name.replace('\\"', '"')


def _thread_id(digits: str) -> tuple[bool, int]:
    if len(digits) > _LONGEST_ID:
        raise ValueError(digits)
    is_hexadecimal = digits[:2] == "0x"
    return is_hexadecimal, int(digits, 16 if is_hexadecimal else 10)


def spelled(name: str, file: str) -> str:
    """A Python function in a folded stack; its class is known by the file there."""
    name, file = name.translate(_FOLDED), file.translate(_FOLDED)
    if file.endswith(".py") or file.startswith("<"):
        return f"{name} ({file})"
    # A script may be called anything; this is how CPython spells functions for perf.
    return f"py::{name}:{file}"


class _Reader:
    """Reads a document into ``profile``."""

    def __init__(self, document: Any) -> None:  # noqa: ANN401 - JSON of any shape
        exporter = _EXPORTER.match(str(document.get("exporter")))
        self.profile = Profile(exporter[1] if exporter else "")
        self._table: list[dict[str, Any]] = document["shared"]["frames"]
        self.profile.has_native = any(map(_is_shared_object, self._table))
        #: What is told of a frame, or of a stack, by its number or numbers.
        self._texts = [self._text(frame) for frame in self._table]
        self._known: dict[tuple[int, ...], tuple[int | None, ThreadName | None, Stack]] = {}
        for profile in document["profiles"]:
            self._read(profile["name"], profile["samples"])

    def _read(self, title: str, samples: Iterable[Sequence[int]]) -> None:
        named = thread_name(title)
        here: set[int] = set()
        for numbers in samples:
            key = tuple(numbers)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._stack(key)
            pid, framed, stack = known
            owner = framed or named
            if owner is None:
                raise ValueError(title)
            if owner.is_pthread:
                raise KsymError(
                    "py-spy has only pthread ids of the threads, which perf does not know",
                    "record without --nonblocking; in a container, with Python 3.11 or later",
                )
            self._thread(owner, pid or owner.pid, here).samples.append(stack)

    def _thread(self, owner: ThreadName, pid: int | None, here: set[int]) -> Thread:
        thread = self.profile.threads.get(owner.tid)
        if thread is None:
            thread = self.profile.threads[owner.tid] = Thread(owner.tid, pid, owner.name)
        elif owner.tid not in here:
            thread.in_order = False
        here.add(owner.tid)
        return thread

    def _stack(self, numbers: tuple[int, ...]) -> tuple[int | None, ThreadName | None, Stack]:
        """The process and thread that the first frames tell, and the rest."""
        if any(number < 0 for number in numbers):
            raise ValueError(numbers)
        pid: int | None = None
        for at, number in enumerate(numbers):
            name = str(self._table[number]["name"])
            process = _PROCESS.match(name)
            if process is None:
                thread = thread_of(name)
                rest = numbers[at if thread is None else at + 1 :]
                return pid, thread, Stack(tuple(self._texts[n] for n in rest))
            pid = int(process[1])
        return pid, None, Stack(())

    def _text(self, frame: dict[str, Any]) -> tuple[str, bool]:
        name, file = str(frame["name"]), str(frame.get("file") or "")
        is_python = not self.profile.has_native or file.endswith(_PYTHON_FILE) or file[:1] == "<"
        if is_python:
            return spelled(name, file), True
        if name.startswith("0x"):  # An address without a symbol, other in each process.
            name = f"[{file.rpartition('/')[2]}]"
        return name.translate(_FOLDED), False


def _is_shared_object(frame: dict[str, Any]) -> bool:
    return _SHARED_OBJECT.search(str(frame.get("file") or "")) is not None
