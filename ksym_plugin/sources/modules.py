"""Loads and unloads of kernel modules, as they happen.

Uevents wake, and /proc/modules tells who is where: it is compared with what is known. A
module's load is told once its functions are known, which another process finds out, with
the times at which it was seen; its unload, at once. The code for its init alone is a symbol
of its own, which goes when that is over: the kernel gives its place to others while the
module lives.
"""

from __future__ import annotations

import select
import time
from itertools import zip_longest

from ksym_plugin.kernel.elf import module_sections
from ksym_plugin.kernel.identity import build_id
from ksym_plugin.kernel.modules import LISTING, LOADING, UNLOADING, Listed, Uevents, parse_listing
from ksym_plugin.sources.module_reader import ModuleReader
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.packed import PackedFunctions
from ksym_plugin.timeline.symbols import MODULE, Lifetime, Load, Loss, Symbol, Unload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.sources.module_child import Answer, Code, Question
    from ksym_plugin.timeline.source import Change

SYSFS: Final = "/sys/module"
#: Of so many at once the sections are read: with more it would take long.
_MOST_SECTIONS: Final = 8
#: How many modules are named in a note.
_MOST_NAMED: Final = 5
_INIT: Final = ".init"


class Known:
    """One loading of a module: where it is, and when it came, was up, and went.

    ``symbol`` is None as long as its functions are not known; ``init`` unless what its
    init function needs has been told of and has not gone.
    """

    __slots__ = (
        "build_id",
        "earliest",
        "gone",
        "init",
        "is_asked_again",
        "latest",
        "listed",
        "sections",
        "symbol",
        "up",
    )

    def __init__(self, listed: Listed, earliest: int, latest: int) -> None:
        self.listed = listed
        self.earliest = earliest
        self.latest = latest
        self.up: tuple[int, int] | None = None
        self.gone: tuple[int, int] | None = None
        self.init: Symbol | None = None
        self.is_asked_again = False
        self.symbol: Symbol | None = None
        self.sections: dict[str, int] = {}
        self.build_id: str | None = None

    def is_ready(self) -> bool:
        """Whether waiting on will not tell more."""
        return self.build_id is not None or self.gone is not None or self.listed.state != LOADING

    def asks_again(self) -> bool:
        """Whether a question without an answer is to be asked once more."""
        is_first, self.is_asked_again = not self.is_asked_again, True
        return is_first and self.gone is None

    def forget_init(self) -> None:
        """Its init was over when nobody knew of it yet."""
        if self.up is not None:
            kept = {name: at for name, at in self.sections.items() if not name.startswith(_INIT)}
            self.sections = kept

    def question(self) -> Question:
        listed = self.listed
        return listed.name, listed.base, listed.size, self.sections, self.build_id

    def is_told_by(self, answer: Answer) -> bool:
        """Whether an answer is one, and about this loading and no later one."""
        problem, when = answer[:2]
        return not problem and (self.gone is None or when <= self.gone[1])

    def load(self, code: Code) -> Load:
        """The load of some of its code."""
        start, length, data = code
        name = self.listed.name
        symbol = Symbol(start, start + length, name, MODULE, name)
        return Load(symbol, self.earliest, self.latest, functions=PackedFunctions(data))

    def unloads(self) -> list[Change]:
        """What of it has gone that was told of."""
        changes: list[Change] = []
        if self.init is not None and self.up is not None:
            changes.append(Unload(self.init.start, *self.up, self.init.name))
            self.init = None
        if self.symbol is not None and self.gone is not None:
            changes.append(Unload(self.symbol.start, *self.gone, self.symbol.name))
        return changes


class Modules:
    """Follows modules from its construction on; SourceError if the kernel does not let it.

    ``earlier`` are lifetimes that an earlier session left open, ``since`` when that ended.
    """

    def __init__(
        self,
        earlier: list[Lifetime] | None = None,
        since: int = 0,
        listing: str = LISTING,
        sysfs: str = SYSFS,
        uevents: Uevents | None = None,
        reader: ModuleReader | None = None,
    ) -> None:
        #: What a user should know of modules that are not in the history.
        self.notes: list[str] = []
        self._listing = listing
        self._sysfs = sysfs
        self._since = since
        self._looked = since
        self._known: dict[str, Known] = {}
        #: Those to ask about, and those that have been, in the order of the questions.
        self._waiting: list[Known] = []
        self._asked: list[Known] = []
        self._silent: list[str] = []
        #: Whose "remove" was not read yet when the list had them no more.
        self._unannounced: set[str] = set()
        self._earlier: dict[str, Lifetime] = {}
        self._reader = reader or ModuleReader()
        self._epoll = select.epoll()
        try:
            self._uevents = uevents or Uevents()
        except BaseException:
            self._epoll.close()
            raise
        try:
            self._epoll.register(self._uevents, select.EPOLLIN)
            self._found = self._look([]) + self._resume(earlier or [])
            for known in self._waiting:
                known.forget_init()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when ``read`` should be called; that is due every second in any case."""
        return self._epoll.fileno()

    @property
    def unsettled(self) -> int | None:
        """The time from which on a load may not have been told yet; None if all are."""
        return min((known.earliest for known in (*self._asked, *self._waiting)), default=None)

    def read(self) -> list[Change]:
        """All changes since the last call; never waits."""
        changes, self._found = self._found, []
        since = self._looked
        events, lost = self._uevents.read()
        if lost:
            changes.append(Loss(since, time.monotonic_ns(), "modules' events"))
            # Whose event was awaited may have lost it: the next one counts again.
            self._unannounced.clear()
        changes += self._look(events)
        if self._reader.fd >= 0:
            answers = self._reader.read()
            if answers is not None:
                changes += self._take(answers)
        return changes + self._ask()

    def finish(self, seconds: float = 5.0) -> list[Change]:
        """What has happened up to now; waits for functions that are not known yet."""
        changes = self.read()
        give_up = time.monotonic() + seconds
        while self._reader.fd >= 0 and time.monotonic() < give_up:
            select.select([self._reader.fd], [], [], 0.1)
            changes += self.read()
        self._silent += [known.listed.name for known in (*self._asked, *self._waiting)]
        if self._silent:
            more = len(self._silent) - _MOST_NAMED
            names = ", ".join(self._silent[:_MOST_NAMED]) + (f" and {more} more" * (more > 0))
            self.notes.append(f"modules whose functions are not in the history: {names}")
        return changes

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._reader.close()
        self._epoll.close()
        self._uevents.close()

    def _look(self, events: list[tuple[bool, str]]) -> list[Change]:
        """Compare the list with what is known; ``events`` are those that came before it."""
        before = time.monotonic_ns()
        listed = self._list()
        now = time.monotonic_ns()
        removed = {name for is_added, name in events if not is_added}
        # Of what the list had lost already, the event came late.
        late = removed & self._unannounced
        removed -= late
        self._unannounced -= late
        # They came and went between two looks: where they were nobody knows.
        self._silent += sorted(removed.difference(self._known))
        for name in removed.intersection(listed):
            # It is torn down already, or there again.
            if listed[name].state == UNLOADING:
                del listed[name]
        changes: list[Change] = []
        for name, known in list(self._known.items()):
            found = listed.get(name)
            if found is None or found.base != known.listed.base or name in removed:
                del self._known[name]
                if name not in removed:
                    self._unannounced.add(name)
                known.gone = (max(self._looked, known.earliest), now)
                known.up = known.up or known.gone
                changes += known.unloads()
        for name, one in listed.items():
            if name not in self._known:
                if one.state == UNLOADING:
                    continue
                self._known[name] = Known(one, self._looked, now)
                self._waiting.append(self._known[name])
            changes += self._see(self._known[name], one, now)
        self._note_sections()
        self._looked = before
        return changes

    def _see(self, known: Known, listed: Listed, now: int) -> list[Change]:
        """That a module is listed; the end of its init is when it is no longer loading."""
        known.listed = listed
        if known.up is None and listed.state != LOADING:
            known.up = (max(self._looked, known.earliest), now)
            return known.unloads()
        return []

    def _resume(self, earlier: list[Lifetime]) -> list[Change]:
        """End what an earlier session left open, but for what may be there still."""
        changes: list[Change] = []
        now = time.monotonic_ns()
        for lifetime in sorted(earlier, key=lambda life: life.loaded_latest):
            before = self._earlier.pop(lifetime.symbol.name, None)
            if before is not None:
                changes.append(self._ended(before, now))
            if lifetime.symbol.name in self._known:
                self._earlier[lifetime.symbol.name] = lifetime
            else:
                changes.append(self._ended(lifetime, now))
        return changes

    def _ended(self, lifetime: Lifetime, latest: int) -> Unload:
        """The unload of what had gone when this session began."""
        symbol = lifetime.symbol
        return Unload(symbol.start, max(self._since, lifetime.loaded_earliest), latest, symbol.name)

    def _note_sections(self) -> None:
        """Note where the sections of new modules are: these may be gone before anybody asks."""
        for known in self._waiting[:_MOST_SECTIONS]:
            if known.gone is None and known.build_id is None:
                folder = f"{self._sysfs}/{known.listed.name}"
                # The kernel makes the notes after all sections are there.
                known.build_id = build_id(f"{folder}/notes/.note.gnu.build-id")
                if known.build_id is not None:
                    known.sections = module_sections(known.listed.name, self._sysfs)

    def _ask(self) -> list[Change]:
        """Have the functions found out of those of which enough is known."""
        if self._reader.fd >= 0 or not self._waiting:
            return []
        self._asked = [known for known in self._waiting if known.is_ready()]
        self._waiting = [known for known in self._waiting if not known.is_ready()]
        if not self._asked:
            return []
        try:
            self._reader.ask([known.question() for known in self._asked])
        except OSError:
            return self._take([])
        self._epoll.register(self._reader.fd, select.EPOLLIN)
        return []

    def _take(self, answers: list[Answer]) -> list[Change]:
        """The changes that had to wait for these answers; with none, there are none."""
        changes: list[Change] = []
        asked, self._asked = self._asked, []
        for known, answer in zip_longest(asked, answers[: len(asked)]):
            if answer is None and known.asks_again():
                # The process was killed, or there was no room for one.
                self._waiting.append(known)
                continue
            name = known.listed.name
            earlier = self._earlier.pop(name, None)
            if answer is not None and known.is_told_by(answer):
                changes += self._tell(known, answer, earlier)
                continue
            self._silent.append(name)
            if earlier is not None:
                changes.append(self._ended(earlier, known.latest))
        return changes

    def _tell(self, known: Known, answer: Answer, earlier: Lifetime | None) -> list[Change]:
        """The load of a module, unless it is what an earlier session told of; its end."""
        _, _, code, init = answer
        load = known.load(code)
        known.symbol = load.symbol
        changes: list[Change] = []
        if earlier is not None:
            if _is_same(earlier, load):
                return known.unloads()
            changes.append(self._ended(earlier, known.latest))
        changes.append(load)
        if init[1]:
            brief = known.load(init)
            known.init = brief.symbol
            changes.append(brief)
        return changes + known.unloads()

    def _list(self) -> dict[str, Listed]:
        try:
            with open(self._listing, encoding="ascii", errors="replace") as file:
                listed = parse_listing(file.read())
        except OSError as error:
            raise SourceError(f"{self._listing} cannot be read ({error.strerror})") from error
        if listed and not any(one.base for one in listed.values()):
            raise SourceError(
                "the kernel hides where its modules are",
                "run as root or with CAP_SYSLOG, and set kernel.kptr_restrict below 2",
            )
        return listed


def _is_same(earlier: Lifetime, load: Load) -> bool:
    """Whether what an earlier session left open is what was found now."""
    before, now = earlier.functions, load.functions
    if before is None or now is None or earlier.symbol.start != load.symbol.start:
        return False
    return before.is_like(now)
