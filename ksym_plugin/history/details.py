"""What a history has beside lifetimes: details of programs, and the functions of modules.

The line table of programs that are alike is stored once, as is the function table of modules
that are alike.
"""

from __future__ import annotations

from array import array

from ksym_plugin.history.schema import integer, query, reading, signed
from ksym_plugin.timeline.packed import PackedFunctions, portable
from ksym_plugin.timeline.program import GONE, unpack_lines
from ksym_plugin.timeline.symbols import UNNAMED_BPF, Record, trampoline_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from ksym_plugin.timeline.program import LineTable, ProgramDetails
    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation


_LINE_TABLE = "INSERT OR IGNORE INTO line_table (digest, data) VALUES (?, ?)"
_PROGRAM = (
    "INTO program (boot, prog_id, tag, type, uid, load_time, starts, problem, line_table)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, (SELECT id FROM line_table WHERE digest = ?))"
)
_SELECT = (
    "SELECT tag, type, uid, load_time, starts, problem, line_table"
    " FROM program WHERE boot = ? AND prog_id = ?"
)
_NAME = (
    "SELECT name FROM lifetime WHERE boot = ? AND start = ? AND prog_id = ? AND name NOT IN ('', ?)"
)
_FUNCTION_TABLE = "INSERT OR IGNORE INTO function_table (digest, data) VALUES (?, ?)"
_MODULE = (
    "INSERT OR REPLACE INTO module VALUES (?, (SELECT id FROM function_table WHERE digest = ?))"
)
_FORGET_ORPHANS = (
    "DELETE FROM span WHERE lifetime NOT IN (SELECT id FROM lifetime)",
    (
        "DELETE FROM program WHERE (boot, prog_id) NOT IN"
        " (SELECT boot, prog_id FROM lifetime WHERE prog_id IS NOT NULL)"
    ),
    (
        "DELETE FROM line_table WHERE id NOT IN"
        " (SELECT line_table FROM program WHERE line_table IS NOT NULL)"
    ),
    "DELETE FROM module WHERE lifetime NOT IN (SELECT id FROM lifetime)",
    "DELETE FROM function_table WHERE id NOT IN (SELECT function_table FROM module)",
)
#: How many line tables stay unpacked.
_MOST_TABLES = 512


def write_program(database: sqlite3.Connection, boot: int, programs: list[ProgramDetails]) -> None:
    """Write what is known of programs. One that is gone never replaces earlier details."""
    tables = {known.digest: known.lines for known in programs if known.lines}
    database.executemany(_LINE_TABLE, tables.items())
    targets = [(boot, known.trampoline, known.target) for known in programs if known.target]
    database.executemany("INSERT OR REPLACE INTO trampoline VALUES (?, ?, ?)", targets)
    for known in programs:
        how = "INSERT OR REPLACE " if known.tag else "INSERT OR IGNORE "
        database.execute(how + _PROGRAM, _values(boot, known))


class RecordedProgram(Record):
    """One program as a history has it; ``problem`` says why it has no lines, if so.

    ``load_time`` is CLOCK_MONOTONIC ns. ``tag`` is empty where only the id is known.
    """

    __slots__ = ()
    tag: str
    type: int
    uid: int
    load_time: int
    starts: list[int]
    problem: str
    table: int | None


class Programs:
    """The programs of one boot; reads from the file what it is asked for."""

    def __init__(self, database: sqlite3.Connection, path: str, boot: int) -> None:
        self._database = database
        self._path = path
        self._boot = boot
        self._programs: dict[int, RecordedProgram | None] = {}
        self._tables: dict[int, LineTable] = {}
        self._targets: dict[int, str | None] = {}
        self._names: dict[int, str | None] = {}

    def clear(self) -> None:
        """Forget what was read: the file is being written."""
        self._programs.clear()
        self._targets.clear()
        self._names.clear()

    def of(self, lifetime: Lifetime) -> RecordedProgram | None:
        """The program that a symbol belongs to; None if nothing is known of it."""
        prog_id = lifetime.prog_id
        if prog_id is None:
            return None
        if prog_id not in self._programs:
            rows = query(self._database, self._path, _SELECT, self._boot, prog_id)
            with reading(self._path):
                self._programs[prog_id] = _program(rows[0]) if rows else None
        return self._programs[prog_id]

    def traced(self, lifetime: Lifetime) -> str | None:
        """The kernel function whose calls a trampoline takes to programs."""
        key = trampoline_key(lifetime.symbol.name)
        if key is None:
            return None
        if key not in self._targets:
            select = "SELECT target FROM trampoline WHERE boot = ? AND key = ?"
            rows = query(self._database, self._path, select, self._boot, key)
            self._targets[key] = str(rows[0][0]) if rows else None
        return self._targets[key]

    def program_name(self, lifetime: Lifetime) -> str | None:
        """The name of the program that a function is part of: that of its main function."""
        number, program = lifetime.prog_id, self.of(lifetime)
        if number is None or program is None or not program.starts:
            return None
        if number not in self._names:
            # The kernel lists the main function first (bpf_prog_get_info_by_fd).
            main = signed(program.starts[0])
            rows = query(self._database, self._path, _NAME, self._boot, main, number, UNNAMED_BPF)
            self._names[number] = str(rows[0][0]) if rows else None
        return self._names[number]

    def missed(self) -> int:
        """How many programs were gone before their lines could be read."""
        select = "SELECT count(*) FROM program WHERE boot = ? AND problem = ?"
        return int(query(self._database, self._path, select, self._boot, GONE)[0][0])

    def line(self, lifetime: Lifetime, offset: int) -> SourceLocation | None:
        """The source line of the instruction at an offset into a symbol."""
        program = self.of(lifetime)
        if program is None or program.table is None:
            return None
        start = lifetime.symbol.start
        if start not in program.starts:
            return None
        return self._table(program.table).find(program.starts.index(start), offset)

    def _table(self, number: int) -> LineTable:
        table = self._tables.get(number)
        if table is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            select = "SELECT data FROM line_table WHERE id = ?"
            rows = query(self._database, self._path, select, number)
            with reading(self._path):
                table = self._tables[number] = unpack_lines(rows[0][0] if rows else b"")
        return table


def _values(boot: int, known: ProgramDetails) -> tuple[object, ...]:
    starts = array("Q", [start for start, _, _ in known.functions])
    return (
        boot,
        known.id,
        bytes.fromhex(known.tag),
        known.type,
        known.uid,
        known.load_time,
        portable(starts).tobytes(),
        known.problem or None,
        known.digest or None,
    )


def _program(row: tuple[bytes, int, int, int, bytes, str | None, int | None]) -> RecordedProgram:
    tag, kind, uid, load_time, packed, problem, table = row
    for value in (kind, uid, load_time, table):
        integer(value or 0)
    starts = array("Q")
    starts.frombytes(packed[: len(packed) // 8 * 8])
    return RecordedProgram(
        bytes(tag).hex(),
        kind,
        uid,
        load_time,
        portable(starts).tolist(),
        str(problem or ""),
        table,
    )


def write_functions(
    database: sqlite3.Connection, modules: Iterable[tuple[int, PackedFunctions]]
) -> None:
    """Write the functions of lifetimes, which are given by row."""
    for row, functions in modules:
        digest = functions.digest
        database.execute(_FUNCTION_TABLE, (digest, functions.data))
        database.execute(_MODULE, (row, digest))


def forget_orphans(database: sqlite3.Connection) -> None:
    """Drop what belongs to no lifetime any more, and tables that nothing uses."""
    for statement in _FORGET_ORPHANS:
        database.execute(statement)


class Functions:
    """The functions of modules; reads from the file what it is asked for."""

    def __init__(self, database: sqlite3.Connection, path: str) -> None:
        self._database = database
        self._path = path
        self._tables: dict[int, PackedFunctions] = {}

    def of(self, lifetime: Lifetime) -> PackedFunctions | None:
        """Those of a module's lifetime, None if nothing is known of them."""
        select = "SELECT function_table FROM module WHERE lifetime = ?"
        rows = query(self._database, self._path, select, lifetime.row)
        return self._table(rows[0][0]) if rows else None

    def _table(self, number: int) -> PackedFunctions:
        table = self._tables.get(number)
        if table is None:
            select = "SELECT data FROM function_table WHERE id = ?"
            rows = query(self._database, self._path, select, number)
            with reading(self._path):
                table = self._tables[number] = PackedFunctions(rows[0][0] if rows else b"")
        return table
