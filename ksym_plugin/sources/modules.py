"""Loads and unloads of kernel modules, as they happen.

Uevents wake, and /proc/modules, compared with what it was before, says which module is where.
A load is reported once the module's functions are known, with the times at which it was seen; an
unload, at once. The code of a module's init function is a symbol of its own, which ends when that
returns: its memory goes to others while the module lives.

A process that ends when it has answered finds out the functions, so that what takes long neither
makes the recorder late nor stays in its memory. A module's ELF file is exact. Where there is none,
or for many modules at once, /proc/kallsyms is read up to BPF's lines: those alone make reading it
slow.
"""

from __future__ import annotations

import os
import select
import time
from bisect import bisect_right
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ksym_plugin.kernel import elf, privileges
from ksym_plugin.kernel.identity import build_id
from ksym_plugin.kernel.kallsyms import KALLSYMS, functions_by_module
from ksym_plugin.kernel.modules import LISTING, LOADING, UNLOADING, Listed, Uevents, read_listing
from ksym_plugin.kernel.worker import Worker
from ksym_plugin.timeline.errors import KsymError, SourceError
from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.symbols import MODULE, Lifetime, Load, Loss, Symbol, Unload

if TYPE_CHECKING:
    from typing import Optional

    from ksym_plugin.kernel.worker import Connection
    from ksym_plugin.timeline.packed import FunctionRow
    from ksym_plugin.timeline.tracker import Change

    #: Name, base address, bytes, sections, build id.
    Question = tuple[str, int, int, dict[str, int], Optional[str]]
    #: Where code is, how long, and its functions as ``pack_functions`` makes them.
    Code = tuple[int, int, bytes]
    #: When it was so; the module's code, and that for its init alone. None where the
    #: functions cannot be told.
    Answer = Optional[tuple[int, Code, Optional[Code]]]

SYSFS = "/sys/module"
#: Of so many at once the sections are read: with more it would take long.
_MOST_SECTIONS = 8
#: How many modules are named in a note.
_MOST_NAMED = 5
_INIT = ".init"
#: How long the process may take, in seconds, init functions that it waits for included.
_LIMIT = 10.0
#: An ELF file takes some 10 ms, kallsyms 50 ms for all there are.
_MOST_FILES = 8
#: How long an init function is waited for, whose module only kallsyms describes.
_INIT_SECONDS = 3.0
_STEP_SECONDS = 0.02


@dataclass(eq=False)
class Module:
    """One loading of a module. Windows of time are CLOCK_MONOTONIC ns."""

    listed: Listed
    #: Its load lies between these.
    earliest: int
    latest: int
    #: When its init function ended, and when it was unloaded; None if it has not.
    init_end: tuple[int, int] | None = None
    unload: tuple[int, int] | None = None
    #: Of its code, once the functions are known.
    symbol: Symbol | None = None
    #: Of the code for its init, from when that was reported until its end was.
    init_symbol: Symbol | None = None
    sections: dict[str, int] = field(default_factory=dict)
    build_id: str | None = None
    was_asked_again: bool = False

    def is_ready(self) -> bool:
        """Whether all is known that its functions are asked for with."""
        return self.build_id is not None or self.unload is not None or self.listed.state != LOADING

    def question(self) -> Question:
        listed = self.listed
        return listed.name, listed.base, listed.size, self.sections, self.build_id

    def load_of(self, code: Code) -> Load:
        start, length, data = code
        name = self.listed.name
        symbol = Symbol(start, start + length, name, MODULE, name)
        return Load(symbol, self.earliest, self.latest, functions=PackedFunctions(data))

    def unloads(self) -> list[Change]:
        """The ends of what was reported and has gone."""
        changes: list[Change] = []
        if self.init_symbol is not None and self.init_end is not None:
            changes.append(Unload(self.init_symbol.start, *self.init_end, self.init_symbol.name))
            self.init_symbol = None
        if self.symbol is not None and self.unload is not None:
            changes.append(Unload(self.symbol.start, *self.unload, self.symbol.name))
        return changes


class Modules:
    """Follows modules from its construction on; SourceError if the kernel does not allow it.

    ``earlier`` are lifetimes that an earlier session left open; it ended at ``since``.
    """

    def __init__(
        self,
        earlier: list[Lifetime] | None = None,
        since: int = 0,
        listing: str = LISTING,
        sysfs: str = SYSFS,
        uevents: Uevents | None = None,
        reader: FunctionReader | None = None,
    ) -> None:
        #: Sentences about modules that are not in the history.
        self.notes: list[str] = []
        self._listing, self._sysfs = listing, sysfs
        self._since = self._last_look = since
        self._modules: dict[str, Module] = {}
        #: Those whose functions are to be asked for, and have been asked for.
        self._waiting: list[Module] = []
        self._asked: list[Module] = []
        #: Names of those whose functions will not be known.
        self._unknown: list[str] = []
        #: Those that were no longer listed before their "remove" event was read.
        self._unannounced: set[str] = set()
        self._earlier: dict[str, Lifetime] = {}
        with ExitStack() as stack:
            self._reader = stack.enter_context(closing(reader or FunctionReader()))
            self._uevents = stack.enter_context(closing(uevents or Uevents()))
            self._epoll = stack.enter_context(closing(select.epoll()))
            self._epoll.register(self._uevents, select.EPOLLIN)
            self._changes = self._look([]) + self._resume(earlier or [])
            for one in self._waiting:
                if one.init_end is not None:
                    # The init function had returned before: its sections are others' by now.
                    for name in [name for name in one.sections if name.startswith(_INIT)]:
                        del one.sections[name]
            self._stack = stack.pop_all()

    def fileno(self) -> int:
        """Readable when ``read`` should be called; that is due every second in any case."""
        return self._epoll.fileno()

    @property
    def unsettled(self) -> int | None:
        """The time from which on a load may not have been reported yet; None if all are."""
        return min((one.earliest for one in (*self._asked, *self._waiting)), default=None)

    def read(self) -> list[Change]:
        """All changes since the last call; never waits."""
        changes, self._changes = self._changes, []
        since = self._last_look
        events, lost = self._uevents.read()
        if lost:
            changes.append(Loss(since, time.monotonic_ns(), "modules' events"))
            # Whose event was awaited may have lost it: the next one counts again.
            self._unannounced.clear()
        changes += self._look(events)
        answers = self._reader.read()
        if answers is not None:
            changes += self._take(answers)
        return changes + self._ask()

    def finish(self, seconds: float = 5.0) -> list[Change]:
        """What has happened up to now; waits for functions that are not known yet."""
        changes = self.read()
        give_up = time.monotonic() + seconds
        while self._reader.fileno() >= 0 and time.monotonic() < give_up:
            select.select([self._reader], [], [], 0.1)
            changes += self.read()
        self._unknown += [one.listed.name for one in (*self._asked, *self._waiting)]
        if self._unknown:
            more = len(self._unknown) - _MOST_NAMED
            names = ", ".join(self._unknown[:_MOST_NAMED]) + (f" and {more} more" * (more > 0))
            self.notes.append(f"modules whose functions are not in the history: {names}")
        return changes

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stack.close()

    def _look(self, events: list[tuple[bool, str]]) -> list[Change]:
        """Compare the list with that before; ``events`` are those that came in between."""
        before = time.monotonic_ns()
        listed = self._list()
        now = time.monotonic_ns()
        removed = self._removed(events)
        changes = self._end_missing(listed, removed, now)
        for name, one in listed.items():
            if name not in self._modules:
                if one.state == UNLOADING:  # Also of one that was known, and has been ended.
                    continue
                self._modules[name] = Module(one, self._last_look, now)
                self._waiting.append(self._modules[name])
            module = self._modules[name]
            module.listed = one
            if module.init_end is None and one.state != LOADING:
                module.init_end = (max(self._last_look, module.earliest), now)
                changes += module.unloads()
        self._read_sections()
        self._last_look = before
        return changes

    def _removed(self, events: list[tuple[bool, str]]) -> set[str]:
        """The modules that went, by their events."""
        removed = {name for is_added, name in events if not is_added}
        # Of what was no longer listed before, the event came late.
        late = removed & self._unannounced
        removed -= late
        self._unannounced -= late
        # They came and went between two looks: where they were is not known.
        self._unknown += sorted(removed.difference(self._modules))
        return removed

    def _end_missing(self, listed: dict[str, Listed], removed: set[str], now: int) -> list[Change]:
        """The unloads of modules that are not listed any more, or are others by now."""
        changes: list[Change] = []
        for name, module in list(self._modules.items()):
            found = listed.get(name)
            if found is None or found.base != module.listed.base or name in removed:
                del self._modules[name]
                if name not in removed:
                    self._unannounced.add(name)
                module.unload = (max(self._last_look, module.earliest), now)
                module.init_end = module.init_end or module.unload
                changes += module.unloads()
        return changes

    def _resume(self, earlier: list[Lifetime]) -> list[Change]:
        """End what an earlier session left open, but for what may be there still."""
        now = time.monotonic_ns()
        in_order = sorted(earlier, key=lambda lifetime: lifetime.loaded_latest)
        latest = {lifetime.symbol.name: lifetime for lifetime in in_order}
        self._earlier = {name: one for name, one in latest.items() if name in self._modules}
        return [
            self._end_of(lifetime, now)
            for lifetime in in_order
            if self._earlier.get(lifetime.symbol.name) is not lifetime
        ]

    def _end_of(self, lifetime: Lifetime, latest: int) -> Unload:
        """The unload of a module that had gone when this session began."""
        symbol = lifetime.symbol
        return Unload(symbol.start, max(self._since, lifetime.loaded_earliest), latest, symbol.name)

    def _read_sections(self) -> None:
        """Note where new modules' sections are: a module may be gone before it is asked about."""
        for module in self._waiting[:_MOST_SECTIONS]:
            if module.unload is None and module.build_id is None:
                folder = f"{self._sysfs}/{module.listed.name}"
                # The kernel makes the notes after all sections are there.
                module.build_id = build_id(f"{folder}/notes/.note.gnu.build-id")
                if module.build_id is not None:
                    module.sections = elf.module_sections(module.listed.name, self._sysfs)

    def _ask(self) -> list[Change]:
        """Ask for the functions of the modules that are ready."""
        ready = [one for one in self._waiting if one.is_ready()]
        if self._reader.fileno() >= 0 or not ready:
            return []
        self._asked = ready
        self._waiting = [one for one in self._waiting if not one.is_ready()]
        try:
            self._reader.ask([one.question() for one in ready])
        except OSError:
            return self._take([])
        self._epoll.register(self._reader, select.EPOLLIN)
        return []

    def _take(self, answers: list[Answer]) -> list[Change]:
        """The changes that had to wait for these answers."""
        changes: list[Change] = []
        asked, self._asked = self._asked, []
        for number, module in enumerate(asked):
            if number >= len(answers) and not module.was_asked_again and module.unload is None:
                # The process was killed, or there was no room for one.
                module.was_asked_again = True
                self._waiting.append(module)
                continue
            name = module.listed.name
            earlier = self._earlier.pop(name, None)
            answer = answers[number] if number < len(answers) else None
            # Functions read after the module had gone are those of a later one.
            if answer and (module.unload is None or answer[0] <= module.unload[1]):
                changes += self._report(module, answer[1:], earlier)
                continue
            self._unknown.append(name)
            if earlier is not None:
                changes.append(self._end_of(earlier, module.latest))
        return changes

    def _report(
        self, module: Module, codes: tuple[Code, Code | None], earlier: Lifetime | None
    ) -> list[Change]:
        """The load of a module, unless an earlier session reported it; its end."""
        code, init = codes
        load = module.load_of(code)
        module.symbol = load.symbol
        changes: list[Change] = []
        if earlier is not None:
            if _is_same(earlier, load):
                return module.unloads()
            changes.append(self._end_of(earlier, module.latest))
        changes.append(load)
        if init is not None:
            init_load = module.load_of(init)
            module.init_symbol = init_load.symbol
            changes.append(init_load)
        return changes + module.unloads()

    def _list(self) -> dict[str, Listed]:
        try:
            listed = read_listing(self._listing)
        except OSError as error:
            raise SourceError(f"{self._listing} cannot be read ({error.strerror})") from error
        if listed and not any(one.base for one in listed.values()):
            raise privileges.modules_hidden()
        return listed


def _is_same(earlier: Lifetime, load: Load) -> bool:
    """Whether what an earlier session left open is what was found now."""
    before, now = earlier.functions, load.functions
    if before is None or now is None or earlier.symbol.start != load.symbol.start:
        return False
    return before.is_like(now)


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
    name, base, size, sections, build_id = question
    path = elf.module_path(name, release) if sections and build_id else None
    if path is None:
        return None
    try:
        file = elf.read_module(path, sections, build_id)
    except (KsymError, ImportError):
        return None
    rows, init = split_init(file.functions(), sections)
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
