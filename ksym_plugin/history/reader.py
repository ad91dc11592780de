"""Reading a history: the timeline as recorded in an SQLite file.

One row a lifetime and one a session of recording; several boots and several hosts fit
in one file, and a look-up never crosses a boot. Readers may open the file while it is
written (WAL). What a dead writer left is readable as it is: its session counts as
covered up to its last commit and as unknown after that.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from functools import cached_property

from ksym_plugin.history.details import Lifetimes, Programs
from ksym_plugin.history.schema import (
    COLUMNS,
    HEARTBEAT,
    KINDS,
    PAGE_SHIFT,
    check_format,
    integer,
    is_running,
    open_read_only,
    optional,
    signed,
    unsigned,
)
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import ClockMap, Instant
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.timeline.index import AREA_SHIFT
from ksym_plugin.timeline.symbols import (
    AMONG_BPF,
    BPF_PROG,
    EXACT,
    GAP,
    MODULE,
    NOT_LOADED,
    OTHER_BPF,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    VACANT,
    Lifetime,
    Loss,
    Record,
)
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ksym_plugin.history.schema import Database
    from ksym_plugin.timeline.timeline import Answer

    Self = TypeVar("Self", bound="_Open")
    T = TypeVar("T")


#: 1 << CONFIG_NODES_SHIFT, which is 10 at the most.
_MOST_NODES = 1 << 10


class Boot(Record):
    """One boot of one host, as the recorder saw it."""

    __slots__ = ()
    row: int
    boot_id: str
    host: str
    release: str
    build_id: str | None
    text_start: int | None
    #: How many NUMA nodes the kernel could have; 1 where that was not recorded.
    nodes: int


class Session(Record):
    """One run of a recorder: it covers ``started`` to ``covered`` (CLOCK_MONOTONIC ns).

    ``closed`` says that it ended in order; ``writing`` that its recorder is at work now.
    Neither means that it was killed after ``covered``. ``modules`` says that it recorded
    modules as well.
    """

    __slots__ = ()
    source: str
    started: int
    covered: int
    closed: bool
    writing: bool
    modules: bool

    @property
    def killed(self) -> bool:
        return not self.closed and not self.writing


_AT_PAGE = (
    f"SELECT {COLUMNS} FROM lifetime WHERE boot = ? AND start BETWEEN ? AND ? UNION ALL"
    # The plus keeps SQLite from reading the boot's whole index for the few of the page.
    f" SELECT {COLUMNS} FROM lifetime WHERE +boot = ? AND id IN"
    " (SELECT lifetime FROM span WHERE page = ? AND lifetime BETWEEN ? AND ?)"
    " ORDER BY loaded, id"
)
_BOUNDS = (
    "SELECT (SELECT min(start) FROM lifetime WHERE boot = this),"
    " (SELECT max(start) FROM lifetime WHERE boot = this), (SELECT max(page) FROM span)"
    " FROM (SELECT ? AS this)"
)
_BPF_STARTS_IN = (
    "SELECT 1 FROM lifetime WHERE boot = ? AND start BETWEEN ? AND ?"
    f" AND kind BETWEEN {KINDS.index(BPF_PROG)} AND {KINDS.index(OTHER_BPF)} LIMIT 1"
)
_SESSIONS = (
    "SELECT source, started, covered, writer_pid, writer_start, closed, modules"
    " FROM session WHERE boot = ? ORDER BY started"
)
_GAPS = "SELECT since, until, cause, count FROM gap WHERE boot = ? ORDER BY since"
_INSTANTS = (
    "SELECT i.monotonic, i.boottime, i.realtime, i.perf FROM instant i"
    " JOIN session s ON s.id = i.session WHERE s.boot = ? ORDER BY i.monotonic"
)
_WHERE_NO_BPF = (UNKNOWN_ADDRESS, VACANT)
#: The source that has no events, only states.
_POLLING = "polling"
_FOREVER = (1 << 63) - 1


class _Open:
    """What has a history open, until the end of a ``with``."""

    _database: Database

    def close(self) -> None:
        """Close the file; idempotent."""
        self._database.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BootHistory(_Open):
    """What was recorded of one boot; reads from the file what it is asked for.

    ``at`` answers as Timeline.at does, and OUTSIDE_HISTORY where no session covers the time.
    """

    def __init__(self, database: Database, boot: Boot) -> None:
        self.boot = boot
        self._database = database
        #: What the programs were, and their source lines.
        self.programs = Programs(database, boot.row)
        self._lifetimes = Lifetimes(database)
        self._extent_before = 0
        self._refresh()

    def _refresh(self) -> None:
        self.programs.clear()
        self._timeline = Timeline()
        self._timeline.nodes = self.boot.nodes
        #: Address to an answer, and from when to when it is valid.
        self._answers: dict[int, tuple[int, int, Answer]] = {}
        self._pages: set[int] = set()
        self._needed: dict[int, set[int]] = {}
        self._has_bpf: dict[int, bool] = {}
        #: Rows entered from one page that another will bring again.
        self._entered: set[int] = set()
        self.sessions = self._read(self._session, _SESSIONS)
        self.losses = self._read(_loss, _GAPS)
        self._polled = [session for session in self.sessions if session.source == _POLLING]
        #: Whether modules were recorded too, for all the time that is covered.
        self.has_modules = all(session.modules for session in self.sessions)
        # Nothing was ever loaded at most kernel addresses: those are not looked up.
        ((first, last, span),) = self._read(_bounds, _BOUNDS)
        self._first_page = unsigned(first) >> PAGE_SHIFT
        self._last_page = max(unsigned(last) >> PAGE_SHIFT, span)
        self._uncovered = self._times_uncovered()
        self._uncovered_starts = [since for since, _ in self._uncovered]
        for loss in self.losses:
            self._timeline.apply(loss)
        for since, until in self._uncovered:
            self._timeline.apply(Loss(since, until, "not recorded"))

    def _session(self, source: object, *row: object) -> Session:
        started, covered, pid, since = map(integer, row[:4])
        closed, modules = map(bool, row[4:])
        writing = not closed and identity.boot_id() == self.boot.boot_id and is_running(pid, since)
        return Session(str(source), started, covered, closed, writing, modules)

    def wait_covered(self, until: int) -> None:
        """If a recorder is at work, let it commit what happened before ``until``.

        Takes at most a little more than its heartbeat.
        """
        give_up = time.monotonic_ns() + 2 * HEARTBEAT
        while any(session.writing and session.covered < until for session in self.sessions):
            if time.monotonic_ns() > give_up:
                return
            time.sleep(HEARTBEAT / 20e9)
            # A resolver must drop what it decided on what had been read before.
            self._extent_before = self.extent + 1
            self._refresh()

    @property
    def extent(self) -> int:
        return self._extent_before + self._timeline.extent

    def covers(self, time_ns: int) -> bool:
        """Whether a session was recording at that time."""
        at = bisect_right(self._uncovered_starts, time_ns) - 1
        return at >= 0 and time_ns > self._uncovered[at][1]

    @property
    def bounds(self) -> tuple[int, int]:
        """From when to when something was recorded, CLOCK_MONOTONIC ns."""
        return self.sessions[0].started, max(run.covered for run in self.sessions)

    def overlaps(self, since: int, until: int) -> bool:
        """Whether a session was recording at any time from ``since`` to ``until``."""
        return any(
            run.started <= until and (run.writing or since <= run.covered) for run in self.sessions
        )

    def clock_map(self) -> ClockMap:
        """The instants at which the recorder read all clocks."""
        return ClockMap(self._read(_instant, _INSTANTS))

    def at(self, address: int, time_ns: int) -> Answer:
        cached = self._answers.get(address)
        if cached is not None and cached[0] <= time_ns <= cached[1]:
            return cached[2]
        answer = self._look_up(address, time_ns)
        if answer[1] == EXACT:
            self._answers[address] = self._widened(address, time_ns, answer, cached)
        return answer

    def holds_until(self, address: int, lifetime: Lifetime | None) -> int:
        """Until when an address is surely a lifetime's, from the last time on that ``at`` said so.

        CLOCK_MONOTONIC ns; -1 if it did not say so last.
        """
        _, until, answer = self._answers.get(address, (0, -1, (None, None)))
        return until if lifetime is not None and answer[0] is lifetime else -1

    def _widened(
        self, address: int, time_ns: int, answer: Answer, before: tuple[int, int, Answer] | None
    ) -> tuple[int, int, Answer]:
        """From when to when an answer is valid, once it has been given a second time.

        A symbol that was there at two times was there in between: another one that replaced
        it meanwhile would still be there.
        """
        lifetime = answer[0]
        if before is None or before[2][0] is not lifetime or lifetime is None:
            return time_ns, time_ns, answer
        since, until = min(before[0], time_ns), max(before[1], time_ns)
        end = lifetime.unloaded_earliest
        if end is None:
            end = self.sessions[-1].covered
        if end > until and self._look_up(address, end) == answer:
            until = end
        if self._timeline.lost_between(since, until):
            return time_ns, time_ns, answer
        return since, until, answer

    def _look_up(self, address: int, time_ns: int) -> Answer:
        if not self.covers(time_ns):
            return None, OUTSIDE_HISTORY
        page = address >> PAGE_SHIFT
        if page not in self._pages and self._first_page <= page <= self._last_page:
            self._read_page(page)
        answer = self._timeline.at(address, time_ns)
        while answer[0] is not None and self._read_all_of(answer[0], time_ns):
            answer = self._timeline.at(address, time_ns)
        lifetime = answer[0]
        if lifetime is not None:
            return (lifetime, GAP) if self._may_be_replaced(lifetime, time_ns) else answer
        if answer[1] in _WHERE_NO_BPF and self._is_among_bpf(address >> AREA_SHIFT):
            # The timeline has only the pages that were read so far.
            return None, AMONG_BPF if answer[1] is UNKNOWN_ADDRESS else NOT_LOADED
        return answer

    def _read_all_of(self, lifetime: Lifetime, time_ns: int) -> bool:
        """Read what is new of all pages of one that has ended: who took a part of it counts."""
        ended, symbol = lifetime.unloaded_latest, lifetime.symbol
        if ended is None or time_ns <= ended:
            return False
        pages = range(symbol.start >> PAGE_SHIFT, ((symbol.end - 1) >> PAGE_SHIFT) + 1)
        unread = [page for page in pages if page not in self._pages]
        for page in unread:
            self._read_page(page)
        return bool(unread)

    def _is_among_bpf(self, number: int) -> bool:
        """As ``AddressIndex.is_among_bpf``, for 2 MB by their number."""
        known = self._has_bpf.get(number)
        if known is None:
            nodes = self.boot.nodes
            first = (number - nodes) << AREA_SHIFT
            last = first + ((2 * nodes + 1) << AREA_SHIFT) - 1
            found = self._read(bool, _BPF_STARTS_IN, signed(first), signed(last))
            known = self._has_bpf[number] = bool(found)
        return known

    def _may_be_replaced(self, lifetime: Lifetime, time_ns: int) -> bool:
        """Whether a later symbol here may be missing: polling sees one late or never."""
        ended = lifetime.unloaded_earliest
        if ended is None or time_ns <= ended or lifetime.symbol.kind == MODULE:
            return False
        return any(session.started <= time_ns <= session.covered for session in self._polled)

    def warnings(self) -> list[str]:
        """What a user must know of this history, a sentence each: killed recorders, losses."""
        lines = [
            f"the {session.source} recorder was killed; nothing after"
            f" {seconds(session.covered)} s (monotonic) was kept"
            for session in self.sessions
            if session.killed
        ]
        if self.losses:
            lost = sum(loss.count or 0 for loss in self.losses)
            span = sum(loss.until - loss.since for loss in self.losses)
            lines.append(
                f"changes were lost {len(self.losses)} times"
                f" ({lost or 'an unknown number'}, within {seconds(span)} s);"
                " names from then are marked uncertain"
            )
        missed = self.programs.missed()
        if missed:
            lines.append(f"the source lines of {missed} programs could not be read in time")
        return lines

    def live(self, time_ns: int) -> list[Lifetime]:
        """The lifetimes that had begun and not ended at ``time_ns``, by start."""
        where = (
            "boot = ? AND loaded - loading <= ? AND (unloaded IS NULL OR unloaded >= ?)"
            " ORDER BY start, loaded"
        )
        lives = self._lifetimes.read(where, self.boot.row, time_ns, time_ns)
        return [life for life in lives if self._is_at(life, time_ns)]

    def lifetimes(self, pattern: str = "%") -> list[Lifetime]:
        """All lifetimes whose name is LIKE ``pattern``, by load."""
        where = "boot = ? AND name LIKE ? ORDER BY loaded, start"
        return self._lifetimes.read(where, self.boot.row, pattern)

    def _read(self, convert: Callable[..., T], statement: str, *values: object) -> list[T]:
        return self._database.read(convert, statement, self.boot.row, *values)

    def _is_at(self, lifetime: Lifetime, time_ns: int) -> bool:
        """Whether nothing loaded later had taken this one's start by then."""
        there, reason = self.at(lifetime.symbol.start, time_ns)
        if there is None:
            # With these reasons a later symbol has come and gone here.
            return reason is not NOT_LOADED and reason is not VACANT
        return there.row == lifetime.row

    def _read_page(self, page: int) -> None:
        """Enter the symbols on a page, and all that decides which of them had an address when.

        That is what was loaded over their starts, and for a symbol without a known end all
        that starts between its own start and the page.
        """
        self._pages.add(page)
        for earlier in self._enter_page(page):
            self._enter_page(earlier)

    def _enter_page(self, page: int) -> set[int]:
        """Enter all that has a byte on a page; returns the earlier pages that it needs."""
        needed = self._needed.get(page)
        if needed is not None:
            return needed
        needed = self._needed[page] = set()
        first = page << PAGE_SHIFT
        last = first + (1 << PAGE_SHIFT) - 1
        boot = self.boot.row
        bounds = (boot, signed(first), signed(last), boot, page, *self._ids)
        for lifetime in self._database.read(self._lifetimes.of, _AT_PAGE, *bounds):
            start, end = lifetime.symbol.start, lifetime.symbol.end
            if start < first:
                began = start >> PAGE_SHIFT
                needed.update(range(began, page) if lifetime.open_ended else (began,))
            if lifetime.row in self._entered:
                continue
            if start < first or end > last + 1:
                self._entered.add(lifetime.row)
            self._timeline.enter(lifetime)
        return needed

    @cached_property
    def _ids(self) -> tuple[int, int]:
        """The first and the last row of this boot; there are other boots' between them."""
        select = "SELECT min(id), max(id) FROM lifetime WHERE boot = ?"
        ((first, last),) = self._read(_bounds, select)
        return first, _FOREVER if any(session.writing for session in self.sessions) else last

    def _times_uncovered(self) -> list[tuple[int, int]]:
        """The times before, between and after the sessions, each from when to when."""
        times = []
        since = -_FOREVER
        for session in self.sessions:
            if session.started > since:
                times.append((since, session.started - 1))
            since = max(since, session.covered + 1)
        return [*times, (since, _FOREVER)]


def seconds(time_ns: int) -> str:
    """A time as perf script prints it."""
    return f"{time_ns // 1_000_000_000}.{time_ns // 1000 % 1_000_000:06d}"


def _loss(since: object, until: object, cause: object, count: object) -> Loss:
    return Loss(integer(since), integer(until), str(cause), optional(count))


def _instant(monotonic: object, boottime: object, realtime: object, perf: object) -> Instant:
    return Instant(integer(monotonic), integer(boottime), integer(realtime), optional(perf))


def _bounds(*row: object) -> tuple[int, ...]:
    return tuple(integer(bound or 0) for bound in row)


def _boot(row: int, *columns: object) -> Boot:
    """A boot of its columns. A file may lack the last one (``ADD_NODES``), or have more."""
    boot_id, host, release, build_id, text, *more = columns
    nodes = more[0] if more else 1
    start = unsigned(text) if isinstance(text, int) else None
    # No kernel can have more nodes (MAX_NUMNODES in linux/numa.h).
    count = max(1, min(nodes, _MOST_NODES)) if isinstance(nodes, int) else 1
    build = build_id if isinstance(build_id, str) else None
    return Boot(row, str(boot_id), str(host), str(release), build, start, count)


class History(_Open):
    """A history file, opened for reading. Raises HistoryError if it cannot be used."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not check_format(path) and os.path.exists(path):
            raise HistoryError(f"{path} is empty", "record into it with: ksym record, or remove it")
        self._database = open_read_only(path)

    def boots(self) -> list[Boot]:
        """The boots in the file, the one recorded last at the end."""
        return self._database.read(
            _boot,
            "SELECT b.* FROM boot b"
            " JOIN session s ON s.boot = b.id GROUP BY b.id ORDER BY max(s.id)",
        )

    def recorded(self, boot: Boot) -> BootHistory:
        """Everything recorded in one boot."""
        return BootHistory(self._database, boot)
