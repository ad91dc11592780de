"""The history's file format: schema, codes, checks and opening.

Addresses are stored as signed 64-bit integers, times in CLOCK_MONOTONIC ns as the
latest instant of a window and the window's width.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat

from ksym_plugin.timeline.errors import HistoryError
from ksym_plugin.timeline.symbols import BPF_MODULE, KERNEL, MODULE, OOL, Lifetime, Load, Symbol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

APPLICATION_ID = 0x6B73796D
FORMAT = 3
#: How often a recorder at work commits at the least, in ns.
HEARTBEAT = 1_000_000_000
#: The code of a kind of symbols in the file is its index here: only ever append.
KINDS = "kernel module bpf_prog bpf_trampoline bpf_dispatcher bpf_struct_ops other_bpf ool".split()
PAGE_SHIFT = 12

SCHEMA = f"""
CREATE TABLE boot (
  id INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, host TEXT NOT NULL,
  release TEXT NOT NULL, build_id TEXT, text_start INTEGER, nodes INTEGER NOT NULL DEFAULT 1,
  UNIQUE (boot_id, host));
CREATE TABLE session (
  id INTEGER PRIMARY KEY, boot INTEGER NOT NULL REFERENCES boot, source TEXT NOT NULL,
  started INTEGER NOT NULL, covered INTEGER NOT NULL, closed INTEGER NOT NULL DEFAULT 0,
  modules INTEGER NOT NULL DEFAULT 0, writer_pid INTEGER NOT NULL, writer_start INTEGER NOT NULL);
CREATE TABLE instant (
  session INTEGER NOT NULL REFERENCES session, monotonic INTEGER NOT NULL,
  boottime INTEGER NOT NULL, realtime INTEGER NOT NULL, perf INTEGER);
CREATE TABLE gap (
  boot INTEGER NOT NULL REFERENCES boot, since INTEGER NOT NULL, until INTEGER NOT NULL,
  count INTEGER, cause TEXT NOT NULL);
CREATE TABLE lifetime (
  id INTEGER PRIMARY KEY, boot INTEGER NOT NULL REFERENCES boot,
  start INTEGER NOT NULL, size INTEGER NOT NULL, name TEXT NOT NULL,
  kind INTEGER NOT NULL, open_ended INTEGER NOT NULL,
  loaded INTEGER NOT NULL, loading INTEGER NOT NULL,
  unloaded INTEGER, unloading INTEGER,
  prog_id INTEGER, pid INTEGER, comm TEXT, module TEXT);
CREATE TABLE span (page INTEGER NOT NULL, lifetime INTEGER NOT NULL REFERENCES lifetime);
CREATE TABLE line_table (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE function_table (
  id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE module (
  lifetime INTEGER PRIMARY KEY REFERENCES lifetime,
  function_table INTEGER NOT NULL REFERENCES function_table);
CREATE TABLE trampoline (
  boot INTEGER NOT NULL REFERENCES boot, key INTEGER NOT NULL, target TEXT NOT NULL,
  PRIMARY KEY (boot, key)) WITHOUT ROWID;
CREATE TABLE program (
  boot INTEGER NOT NULL REFERENCES boot, prog_id INTEGER NOT NULL, tag BLOB NOT NULL,
  type INTEGER NOT NULL, uid INTEGER NOT NULL, load_time INTEGER NOT NULL,
  starts BLOB NOT NULL, problem TEXT, line_table INTEGER REFERENCES line_table,
  PRIMARY KEY (boot, prog_id)) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
"""

#: For a file that was begun without this column.
ADD_NODES = "ALTER TABLE boot ADD COLUMN nodes INTEGER NOT NULL DEFAULT 1"
#: One boot is looked into at a time, and boots use the same pages. Indexes are no part of the
#: format: a writer brings those of older files up to this.
INDEXES = (
    "DROP INDEX IF EXISTS lifetime_start",
    "DROP INDEX IF EXISTS span_page",
    "CREATE INDEX IF NOT EXISTS lifetime_place ON lifetime (boot, start)",
    "CREATE INDEX IF NOT EXISTS span_place ON span (page, lifetime)",
)

COLUMNS = (
    "id, start, size, name, kind, open_ended, loaded, loading, unloaded, unloading,"
    " prog_id, pid, comm, module"
)
_SIGN = 1 << 63
#: No symbol has more bytes, the text of a large module neither.
_LONGEST = 1 << 28
_WRAP = 1 << 64


class Database(sqlite3.Connection):
    """A history that is open. What a damaged file or row leads to is a HistoryError."""

    path: str

    def read(self, convert: Callable[..., T], statement: str, *values: object) -> list[T]:
        """All rows of a statement, each as ``convert`` makes it of its columns."""
        try:
            return [convert(*row) for row in self.execute(statement, values)]
        except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as error:
            raise damaged(self.path, error) from error

    def first(self, convert: Callable[..., T], statement: str, *values: object) -> T | None:
        """The same of the first row; None if there is none."""
        rows = self.read(convert, statement, *values)
        return rows[0] if rows else None


def integer(value: object) -> int:
    """A value of a row. ValueError if it is no integer: SQLite's columns hold anything."""
    if isinstance(value, int):
        return value
    raise ValueError(f"{value!r:.60} stands where a number belongs")


def optional(value: object) -> int | None:
    """The same of a value that may be missing."""
    return None if value is None else integer(value)


def blob(value: object) -> bytes:
    """The same of bytes."""
    if isinstance(value, bytes):
        return value
    raise ValueError(f"{value!r:.60} stands where bytes belong")


def lifetime_of(row: tuple[Any, ...]) -> Lifetime:
    """The lifetime in a row of COLUMNS. ValueError or TypeError if it can be none."""
    number, start, size, name, kind, open_ended, loaded, loading, unloaded, unloading = row[:10]
    prog_id, pid, comm, module = row[10:]
    missing = (prog_id, pid, unloaded, unloading)
    numbers = (start, size, kind, loaded, loading, *(value or 0 for value in missing))
    texts = (name, comm or "", module or "")
    is_sound = {*map(type, numbers)} == {int} and {*map(type, texts)} == {str}
    if not is_sound or not 0 <= kind < len(KINDS) or not 0 < size <= _LONGEST:
        raise ValueError(f"{name!r:.60} of {size!r:.60} bytes is no symbol")
    kind = KINDS[kind]
    start = unsigned(start)
    if module is None and kind not in (KERNEL, MODULE, OOL):
        module = BPF_MODULE
    symbol = Symbol(start, start + size, name, kind, module)
    earliest = loaded - loading
    lifetime = Lifetime(Load(symbol, earliest, loaded, prog_id, bool(open_ended), pid, comm))
    if unloaded is not None:
        lifetime.unloaded_earliest = unloaded - unloading
        lifetime.unloaded_latest = unloaded
    lifetime.row = number
    return lifetime


def signed(address: int) -> int:
    """An address as a signed 64-bit integer; order is the same within each half."""
    return address - _WRAP if address >= _SIGN else address


def unsigned(value: int) -> int:
    """The address that ``signed`` made ``value`` of."""
    return value + _WRAP if value < 0 else value


def damaged(path: str, error: object) -> HistoryError:
    """The error for a file that is damaged behind a sound header."""
    return HistoryError(
        f"{path} cannot be read as a history ({error})",
        "it has not been altered; name another history, or record into another file",
    )


def _header(path: str) -> bytes:
    """The SQLite header (sqlite.org/fileformat.html); empty if there is no file.

    HistoryError if it cannot be read.
    """
    try:
        # The path may be a pipe's that nobody ever writes to.
        with open(
            path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise HistoryError(f"{path} is no regular file", "name another one")
            return file.read(100)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise HistoryError(
            f"{path} cannot be read ({error.strerror})",
            "name a history you may read with -H; one recorded by root is root's alone",
        ) from error


def check_format(path: str) -> bool:
    """Whether the file holds a history of this format; False if it is absent or empty.

    HistoryError for anything else, by the header alone: nothing foreign is ever opened as a
    database, let alone altered.
    """
    header = _header(path)
    if not header:
        return False
    application = int.from_bytes(header[68:72], "big")
    version = int.from_bytes(header[60:64], "big")
    if not header.startswith(b"SQLite format 3\0") or application != APPLICATION_ID:
        raise HistoryError(f"{path} is not a ksym history", "name another file")
    if version != FORMAT:
        raise HistoryError(
            f"{path} has history format {version}, this program reads {FORMAT}",
            "use the ksym-plugin that wrote it, or a newer one",
        )
    return True


def open_read_only(path: str) -> Database:
    """Open without writing; a file left by a closed writer needs no write access at all."""
    if not os.path.exists(path):
        raise HistoryError(f"there is no history {path}", "make one with: ksym record -o " + path)
    quoted = os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    address = f"file:{quoted}?mode=ro"
    # To read a file in WAL mode that has no -wal file, as a copy of one that was being written,
    # SQLite would make that file, or fail where it cannot. Nobody is writing it then.
    if _header(path)[18:20] == b"\2\2" and not os.path.exists(path + "-wal"):
        address += "&immutable=1"
    database = None
    try:
        database = sqlite3.connect(address, uri=True, isolation_level=None, factory=Database)
        database.path = path
        database.execute("SELECT count(*) FROM boot")
    except sqlite3.Error as error:
        if database is not None:
            database.close()
        raise damaged(path, error) from error
    return database


def check_sound(path: str) -> None:
    """Read the whole file once, before anything is written to it. HistoryError if damaged."""
    with contextlib.closing(open_read_only(path)) as database:
        (found,) = database.read(str, "PRAGMA quick_check(1)")
    if found != "ok":
        raise damaged(path, found)


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc(5), stat field 22); 0 if gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_running(pid: int, started: int) -> bool:
    """Whether a recorder is still at work; its pid may be another process's by now."""
    return started != 0 and start_of(pid) == started
