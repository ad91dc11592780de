"""Writing a history: batches, heartbeats, retention.

Everything that happened before ``covered`` is in the file when ``commit`` returns, so a
writer that is killed loses at most what came after its last commit, and its readers
see from the file that it was killed and when. The file belongs to its owner alone
(mode 0600): kernel addresses reveal how the kernel's address space is laid out.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3

from ksym_plugin.history import details
from ksym_plugin.history.schema import (
    ADD_NODES,
    COLUMNS,
    INDEXES,
    KINDS,
    PAGE_SHIFT,
    SCHEMA,
    Database,
    check_format,
    check_sound,
    damaged,
    integer,
    is_running,
    signed,
    start_of,
)
from ksym_plugin.kernel import identity
from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ksym_plugin.kernel.clocks import Instant
    from ksym_plugin.timeline.program import ProgramDetails
    from ksym_plugin.timeline.symbols import Lifetime, Loss

_WRITE = f"INSERT OR REPLACE INTO lifetime (boot, {COLUMNS}) VALUES ({', '.join('?' * 15)})"
#: A later report may have a higher end.
_SPAN = (
    "INSERT INTO span SELECT ?, ?"
    " WHERE NOT EXISTS (SELECT 1 FROM span WHERE page = ? AND lifetime = ?)"
)


class HistoryWriter:
    """One session of recording into ``path``, which is made if it is absent.

    Raises HistoryError if the file is foreign, newer, damaged, not writable, or being
    written by another recorder; it has not been altered then. ``earlier`` holds the
    lifetimes that this boot's earlier sessions left live, ``covered_before`` how far
    the last of them reached (0 if there is none).
    """

    def __init__(self, path: str, source: str, started: int, text_start: int | None) -> None:
        self.path = path
        if check_format(path):
            check_sound(path)
        else:
            _make_private(path)
        self._dirty: dict[int, Lifetime] = {}
        self._programs: list[ProgramDetails] = []
        self._file = _identity(path)
        with _writable(path):
            self._database = sqlite3.connect(
                path, isolation_level=None, timeout=5, factory=Database
            )
            self._database.path = path
            try:
                self._begin(source, started, text_start)
            except BaseException:
                self._database.close()
                raise

    def _begin(self, source: str, started: int, text_start: int | None) -> None:
        database = self._database
        if not database.execute("PRAGMA user_version").fetchone()[0]:
            database.executescript("BEGIN;" + SCHEMA + "COMMIT;")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("BEGIN IMMEDIATE")
        self._refuse_second_writer()
        for statement in INDEXES:
            database.execute(statement)
        self.boot = self._boot_row(text_start)
        (self.covered_before,) = database.read(
            integer, "SELECT coalesce(max(covered), 0) FROM session WHERE boot = ?", self.boot
        )
        self.earlier = details.Lifetimes(database).read("boot = ? AND unloaded IS NULL", self.boot)
        (self._last_row,) = database.read(integer, "SELECT coalesce(max(id), 0) FROM lifetime")
        pid = os.getpid()
        self._session = database.execute(
            "INSERT INTO session (boot, source, started, covered, writer_pid, writer_start)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (self.boot, source, started, started, pid, start_of(pid)),
        ).lastrowid
        database.execute("COMMIT")

    def _refuse_second_writer(self) -> None:
        open_sessions = self._database.read(
            lambda *row: tuple(map(integer, row)),
            "SELECT writer_pid, writer_start FROM session JOIN boot ON boot.id = boot"
            " WHERE NOT closed AND boot_id = ?",
            identity.boot_id() or "",
        )
        for pid, started in open_sessions:
            if is_running(pid, started):
                raise HistoryError(
                    f"{self.path} is being written by another recorder (process {pid})",
                    "record into another file with -o, or stop that one",
                )

    def _boot_row(self, text_start: int | None) -> int:
        with contextlib.suppress(sqlite3.OperationalError):  # The column is there.
            self._database.execute(ADD_NODES)
        boot = (identity.boot_id() or "", identity.hostname())
        start = None if text_start is None else signed(text_start)
        self._database.execute(
            "INSERT INTO boot (boot_id, host, release, build_id, text_start, nodes)"
            " VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (boot_id, host) DO UPDATE SET nodes = excluded.nodes",
            (*boot, identity.release(), identity.build_id(), start, identity.possible_nodes()),
        )
        select = "SELECT id FROM boot WHERE boot_id = ? AND host = ?"
        (row,) = self._database.read(integer, select, *boot)
        return row

    def cover_from(self, started: int) -> None:
        """Have the session cover the time from ``started`` on only."""
        update = "UPDATE session SET started = ?, covered = max(covered, ?) WHERE id = ?"
        self._execute(update, started, started, self._session)

    def cover_modules(self, modules: bool) -> None:
        """Say whether the session keeps modules as well; a new one does not."""
        self._execute("UPDATE session SET modules = ? WHERE id = ?", int(modules), self._session)

    @property
    def pending(self) -> int:
        """Lifetimes and programs noted since the last commit."""
        return len(self._dirty) + len(self._programs)

    def note(self, lifetime: Lifetime) -> None:
        """Have the next commit write this lifetime as it is by then."""
        self._dirty[id(lifetime)] = lifetime

    def note_program(self, details: ProgramDetails) -> None:
        """Have the next commit write what is known of a program."""
        self._programs.append(details)

    def lost(self, loss: Loss) -> None:
        """Write a gap at once: it must be known even if this process dies before a resync."""
        values = (loss.since, loss.until, loss.count, loss.cause)
        insert = "INSERT INTO gap (boot, since, until, count, cause) VALUES (?, ?, ?, ?, ?)"
        self._execute(insert, self.boot, *values)

    def tick(self, instant: Instant) -> None:
        """Keep a reading of all clocks."""
        clocks = (instant.monotonic, instant.boottime, instant.realtime, instant.perf)
        self._execute("INSERT INTO instant VALUES (?, ?, ?, ?, ?)", self._session, *clocks)

    def commit(self, covered: int) -> None:
        """Write what was noted; all changes before ``covered`` must have been noted."""
        if _identity(self.path) != self._file:
            # What is written would be lost.
            raise HistoryError(
                f"{self.path} was moved, deleted or replaced while it was being written",
                "start recording anew",
            )
        last_row = self._last_row
        noted = []
        for lifetime in self._dirty.values():
            last_row += not lifetime.row
            noted.append((lifetime.row or last_row, lifetime))
        with self._transaction() as database:
            database.executemany(_WRITE, [(self.boot, row, *_values(life)) for row, life in noted])
            spans = [span * 2 for row, life in noted for span in _spans(life, row)]
            database.executemany(_SPAN, spans)
            details.write_functions(database, noted)
            details.write_programs(database, self.boot, self._programs)
            update = "UPDATE session SET covered = max(covered, ?) WHERE id = ?"
            database.execute(update, (covered, self._session))
        self._last_row = last_row
        for row, lifetime in noted:
            lifetime.row = row
        self._dirty.clear()
        self._programs.clear()

    def forget(self, before: int) -> None:
        """Forget what ended before ``before`` in this boot: it is no longer covered."""
        # The last instant before stays: times up to the next one need both.
        instants = (
            "DELETE FROM instant WHERE session IN (SELECT id FROM session WHERE boot = :boot)"
            " AND monotonic < (SELECT max(monotonic) FROM instant i JOIN session s"
            " ON s.id = i.session WHERE s.boot = :boot AND i.monotonic <= :before)"
        )
        statements = (
            "DELETE FROM lifetime WHERE boot = :boot AND unloaded < :before",
            "DELETE FROM gap WHERE boot = :boot AND until < :before",
            "UPDATE session SET started = min(covered, max(started, :before)) WHERE boot = :boot",
            instants,
        )
        self._forget(statements, boot=self.boot, before=before)

    def shrink(self, most_bytes: int) -> None:
        """Forget the oldest until what is kept fits: earlier boots, then what ended first."""
        while self._used_bytes() > most_bytes:
            ((oldest,),) = self._execute("SELECT min(id) FROM boot WHERE id != ?", self.boot)
            if oldest is not None:
                self._forget_boot(oldest)
                continue
            ended = "FROM lifetime WHERE boot = ? AND unloaded IS NOT NULL"
            ((count,),) = self._execute(f"SELECT count(*) {ended}", self.boot)
            if not count:
                return
            quarter = f"SELECT unloaded {ended} ORDER BY unloaded LIMIT 1 OFFSET ?"
            ((last,),) = self._execute(quarter, self.boot, count // 4)
            self.forget(last + 1)

    def _forget_boot(self, boot: int) -> None:
        statements = (
            "DELETE FROM lifetime WHERE boot = :boot",
            "DELETE FROM gap WHERE boot = :boot",
            "DELETE FROM instant WHERE session IN (SELECT id FROM session WHERE boot = :boot)",
            "DELETE FROM session WHERE boot = :boot",
            "DELETE FROM boot WHERE id = :boot",
        )
        self._forget(statements, boot=boot)

    def _forget(self, statements: tuple[str, ...], **values: int) -> None:
        with self._transaction() as database:
            for statement in statements:
                database.execute(statement, values)
            details.forget_orphans(database)

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._execute(f"PRAGMA {name}")[0][0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def close(self, covered: int) -> None:
        """Commit and end the session in order; the file is then a single one again."""
        try:
            self.commit(covered)
            self._execute("UPDATE session SET closed = 1 WHERE id = ?", self._session)
            with contextlib.suppress(sqlite3.OperationalError):
                # While readers have it open it stays in WAL mode, which harms nothing.
                self._database.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Database]:
        """All of it or nothing, whatever goes wrong and even if this process dies."""
        with _writable(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")

    def _execute(self, statement: str, *values: object) -> list[Any]:
        with _writable(self.path):
            return self._database.execute(statement, values).fetchall()


def _values(lifetime: Lifetime) -> tuple[object, ...]:
    """The columns of a lifetime from ``start`` on."""
    symbol = lifetime.symbol
    unloaded, since = lifetime.unloaded_latest, lifetime.unloaded_earliest
    return (
        signed(symbol.start),
        symbol.end - symbol.start,
        _text(symbol.name),
        KINDS.index(symbol.kind),
        int(lifetime.open_ended),
        lifetime.loaded_latest,
        lifetime.loaded_latest - lifetime.loaded_earliest,
        unloaded,
        None if unloaded is None or since is None else unloaded - since,
        lifetime.prog_id,
        lifetime.pid,
        lifetime.comm and _text(lifetime.comm),
        None if symbol.module == BPF_MODULE else symbol.module,
    )


def _text(name: str) -> str:
    """A name as UTF-8 can hold it: a source may decode the kernel's bytes to surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()


def _spans(lifetime: Lifetime, row: int) -> list[tuple[int, int]]:
    """The pages beyond its first that a lifetime must be found from."""
    symbol = lifetime.symbol
    first, last = symbol.start >> PAGE_SHIFT, (symbol.end - 1) >> PAGE_SHIFT
    return [(page, row) for page in range(first + 1, last + 1)]


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _make_private(path: str) -> None:
    """Make the file with mode 0600 from the start."""
    try:
        with open(path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)
    except OSError as error:
        raise HistoryError(
            f"{path} cannot be made ({error.strerror})", "name another file with -o"
        ) from error


@contextlib.contextmanager
def _writable(path: str) -> Iterator[None]:
    """What SQLite refuses to do is a HistoryError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise HistoryError(
            f"{path} cannot be written ({error})",
            "free some space, or record into another file with -o",
        ) from error
    except sqlite3.Error as error:
        raise damaged(path, error) from error
