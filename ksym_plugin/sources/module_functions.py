"""Which functions are in modules, found out by a process that ends when it has answered.

There is one for each load, so that what takes long neither makes the recorder late nor
stays in its memory. A module's ELF file is exact. Where there is none, or for many modules
at once, /proc/kallsyms is read up to BPF's lines: those alone make reading it slow.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right

from ksym_plugin.kernel.kallsyms import KALLSYMS, functions_by_module
from ksym_plugin.kernel.modules import LISTING
from ksym_plugin.kernel.worker import Worker
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.packed import pack_functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ksym_plugin.kernel.elf import ElfFile
    from ksym_plugin.kernel.worker import Connection
    from ksym_plugin.timeline.packed import FunctionRow

    #: Name, base address, bytes, sections, build id.
    Question = tuple[str, int, int, dict[str, int], Optional[str]]
    #: Where code is, how long, and its functions as ``pack_functions`` makes them.
    Code = tuple[int, int, bytes]
    #: When it was so; the module's code, and that for its init alone. None where the
    #: functions cannot be told.
    Answer = Optional[tuple[int, Code, Optional[Code]]]

#: How long the process may take, in seconds, init functions that it waits for included.
_LIMIT = 10.0
#: An ELF file takes some 10 ms, kallsyms 50 ms for all there are.
_MOST_FILES = 8
#: How long an init function is waited for, whose module only kallsyms describes.
_INIT_SECONDS = 3.0
_STEP_SECONDS = 0.02
_INIT = ".init"


class FunctionReader:
    """Asks about modules; one process at a time."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._give_up = 0.0

    def fileno(self) -> int:
        """Readable when there is an answer; -1 when nothing is asked."""
        return -1 if self._worker is None else self._worker.fileno()

    def ask(self, questions: list[Question]) -> None:
        """Start the process. OSError if that cannot be."""
        self._worker = Worker(answer)
        self._give_up = time.monotonic() + _LIMIT
        try:
            self._worker.send(questions)
        except BaseException:
            self.close()
            raise

    def read(self) -> list[Answer] | None:
        """The answers once they are there; an empty list if there will be none."""
        if self._worker is None:
            return []
        messages = self._worker.read()
        if not messages and self.fileno() >= 0 and time.monotonic() < self._give_up:
            return None
        self.close()
        answers = messages[0] if messages else []
        return answers if isinstance(answers, list) else []

    def close(self) -> None:
        """End the process, and what it runs to unpack a file; idempotent."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def answer(recorder: Connection) -> None:
    """What the process does: answer all questions at once, in their order."""
    recorder.send(answers(recorder.receive(), os.uname().release))


def answers(
    questions: list[Question], release: str, kallsyms: str = KALLSYMS, listing: str = LISTING
) -> list[Answer]:
    """An answer for each question."""
    few = questions if len(questions) <= _MOST_FILES else []
    found = {number: _by_file(question, release) for number, question in enumerate(few)}
    rest = [number for number in range(len(questions)) if not found.get(number)]
    if rest:
        asked = [questions[number] for number in rest]
        found.update(zip(rest, _by_kallsyms(asked, kallsyms, listing)))
    return [found[number] for number in range(len(questions))]


def _by_file(question: Question, release: str) -> Answer | None:
    """By the module's file; None where that cannot be used."""
    from ksym_plugin.kernel import elf

    name, base, size, sections, build_id = question
    path = elf.module_path(name, release) if sections and build_id else None
    if path is None:
        return None
    try:
        file = elf.read_module(path, sections, build_id)
    except (KsymError, ImportError):
        return None
    rows, init = split_init(functions_of(file), sections)
    # The sections say which module it was, so it may have gone meanwhile.
    return _answer(rows, init, base, size, 0)


def split_init(
    rows: list[FunctionRow], sections: dict[str, int]
) -> tuple[list[FunctionRow], list[FunctionRow]]:
    """Functions that stay, and those that are freed after the init function."""
    in_order = sorted((address, name) for name, address in sections.items())
    starts = [address for address, _ in in_order]
    parts: tuple[list[FunctionRow], list[FunctionRow]] = ([], [])
    for row in rows:
        _, section = in_order[bisect_right(starts, row[0]) - 1]
        parts[section.startswith(_INIT)].append(row)
    return parts


def functions_of(file: ElfFile) -> list[FunctionRow]:
    """Start, length and name of each function, aliases behind the best name."""
    rows = []
    for start in file.starts:
        found = file.find(start)
        if found is not None and found[0] == start:
            rows += [(start, found[1] - start, name) for name in (found[2], *file.aliases(start))]
    return rows


def _by_kallsyms(questions: list[Question], path: str, listing: str) -> list[Answer]:
    _await_inits([name for name, *_ in questions])
    now = time.monotonic_ns()
    try:
        by_module = functions_by_module(path, listing)
    except (OSError, KsymError):
        by_module = {}
    return [
        _answer(by_module.get(name, []), [], base, size, now) for name, base, size, *_ in questions
    ]


def _await_inits(names: list[str]) -> None:
    """Let init functions end: until then kallsyms lists what is freed after that as well."""
    give_up = time.monotonic() + _INIT_SECONDS
    while any(map(_is_coming, names)) and time.monotonic() < give_up:
        time.sleep(_STEP_SECONDS)


def _is_coming(name: str) -> bool:
    try:
        with open(f"/sys/module/{name}/initstate", encoding="ascii") as file:
            return file.read().strip() == "coming"
    except OSError:
        return False


def _answer(
    rows: list[FunctionRow], init: list[FunctionRow], base: int, size: int, now: int
) -> Answer:
    """What is known of a module; None if its functions are unknown, or not where it is."""
    code = _packed(rows) if rows else (0, 0, b"")
    if not base <= code[0] < code[0] + code[1] <= base + size:
        return None
    return now, code, _packed(init) if init else None


def _packed(rows: list[FunctionRow]) -> Code:
    """Functions relative to the lowest one."""
    first = rows[0][0]
    end = max(start + length for start, length, _ in rows)
    data = pack_functions((start - first, length, name) for start, length, name in rows)
    return first, end - first, data
