"""Lifetimes as a history has them, and what it has beside them.

That is the functions of modules and details of programs. The line table of programs that are
alike is stored once, as is the function table of modules that are alike.
"""

from __future__ import annotations

from array import array
from functools import lru_cache, partial

from ksym_plugin.history.schema import COLUMNS, blob, integer, lifetime_of, optional, signed
from ksym_plugin.timeline.packed import PackedFunctions, portable
from ksym_plugin.timeline.program import GONE, unpack_lines
from ksym_plugin.timeline.symbols import MODULE, UNNAMED_BPF, Record, trampoline_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from ksym_plugin.history.schema import Database
    from ksym_plugin.timeline.program import LineTable, ProgramDetails
    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation


_LINE_TABLE = "INSERT OR IGNORE INTO line_table (digest, data) VALUES (?, ?)"
_PROGRAM = (
    "INTO program (boot, prog_id, tag, type, uid, load_time, starts, problem, line_table)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, (SELECT id FROM line_table WHERE digest = ?))"
)
_PROGRAM_OF = (
    "SELECT prog_id, tag, type, uid, load_time, starts, problem, line_table"
    " FROM program WHERE boot = ? AND prog_id = ?"
)
_TARGET_OF = "SELECT target FROM trampoline WHERE boot = ? AND key = ?"
_LINES_OF = "SELECT data FROM line_table WHERE id = ?"
_FUNCTIONS_OF = "SELECT data FROM function_table WHERE id = ?"
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
#: How many tables of a kind stay unpacked.
_MOST_TABLES = 512


def write_programs(database: sqlite3.Connection, boot: int, programs: list[ProgramDetails]) -> None:
    """Write what is known of programs. One that is gone never replaces earlier details."""
    tables = {known.digest: known.lines for known in programs if known.lines}
    database.executemany(_LINE_TABLE, tables.items())
    targets = [(boot, known.trampoline, known.target) for known in programs if known.target]
    database.executemany("INSERT OR REPLACE INTO trampoline VALUES (?, ?, ?)", targets)
    for known in programs:
        how = "INSERT OR REPLACE " if known.tag else "INSERT OR IGNORE "
        starts = portable(array("Q", [start for start, _, _ in known.functions]))
        values = (
            *(boot, known.id, bytes.fromhex(known.tag), known.type, known.uid, known.load_time),
            *(starts.tobytes(), known.problem or None, known.digest or None),
        )
        database.execute(how + _PROGRAM, values)


def write_functions(
    database: sqlite3.Connection, lifetimes: Iterable[tuple[int, Lifetime]]
) -> None:
    """Write the functions of modules among lifetimes, each of which is given with its row."""
    for row, lifetime in lifetimes:
        functions = lifetime.functions
        if functions is not None:
            digest = functions.digest
            database.execute(_FUNCTION_TABLE, (digest, functions.data))
            database.execute(_MODULE, (row, digest))


def forget_orphans(database: sqlite3.Connection) -> None:
    """Drop what belongs to no lifetime any more, and tables that nothing uses."""
    for statement in _FORGET_ORPHANS:
        database.execute(statement)


class RecordedProgram(Record):
    """One program as a history has it; ``problem`` says why it has no lines, if so.

    ``load_time`` is CLOCK_MONOTONIC ns. ``tag`` is empty where only the id is known.
    ``name`` is that of its main function, None if that is not known.
    """

    __slots__ = ()
    tag: str
    type: int
    uid: int
    load_time: int
    starts: list[int]
    problem: str
    table: int | None
    name: str | None


class Programs:
    """The programs of one boot; reads from the file what it is asked for."""

    def __init__(self, database: Database, boot: int) -> None:
        self._database = database
        self._boot = boot
        self._program = lru_cache(None)(partial(database.first, self._made, _PROGRAM_OF, boot))
        self._target = lru_cache(None)(partial(database.first, str, _TARGET_OF, boot))
        self._lines = lru_cache(_MOST_TABLES)(partial(database.first, _lines, _LINES_OF))

    def clear(self) -> None:
        """Forget what was read: the file is being written."""
        self._program.cache_clear()
        self._target.cache_clear()

    def of(self, lifetime: Lifetime) -> RecordedProgram | None:
        """The program that a symbol belongs to; None if nothing is known of it."""
        return None if lifetime.prog_id is None else self._program(lifetime.prog_id)

    def traced(self, lifetime: Lifetime) -> str | None:
        """The kernel function whose calls a trampoline takes to programs."""
        key = trampoline_key(lifetime.symbol.name)
        return None if key is None else self._target(key)

    def program_name(self, lifetime: Lifetime) -> str | None:
        """The name of the program that a function is part of: that of its main function."""
        program = self.of(lifetime)
        return None if program is None else program.name

    def missed(self) -> int:
        """How many programs were gone before their lines could be read."""
        select = "SELECT count(*) FROM program WHERE boot = ? AND problem = ?"
        (count,) = self._database.read(int, select, self._boot, GONE)
        return count

    def line(self, lifetime: Lifetime, offset: int) -> SourceLocation | None:
        """The source line of the instruction at an offset into a symbol."""
        program = self.of(lifetime)
        start = lifetime.symbol.start
        if program is None or program.table is None or start not in program.starts:
            return None
        lines = self._lines(program.table)
        return None if lines is None else lines.find(program.starts.index(start), offset)

    def _made(self, number: int, *row: object) -> RecordedProgram:
        tag, kind, uid, load_time, packed, problem, table = row
        data, starts = blob(packed), array("Q")
        starts.frombytes(data[: len(data) // 8 * 8])
        starts = portable(starts)
        name = None
        if starts:
            # The kernel lists the main function first (bpf_prog_get_info_by_fd).
            main = signed(starts[0])
            name = self._database.first(str, _NAME, self._boot, main, number, UNNAMED_BPF)
        numbers = (integer(kind), integer(uid), integer(load_time))
        return RecordedProgram(
            blob(tag).hex(), *numbers, starts.tolist(), str(problem or ""), optional(table), name
        )


def _lines(data: object) -> LineTable:
    return unpack_lines(blob(data))


def _functions(data: object) -> PackedFunctions:
    return PackedFunctions(blob(data))


class Lifetimes:
    """The lifetimes of a history, those of modules with their functions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._functions = lru_cache(_MOST_TABLES)(
            partial(database.first, _functions, _FUNCTIONS_OF)
        )

    def read(self, where: str, *values: object) -> list[Lifetime]:
        """Those of a condition, which may go on to say their order."""
        return self._database.read(
            self.of, f"SELECT {COLUMNS} FROM lifetime WHERE {where}", *values
        )

    def of(self, *row: object) -> Lifetime:
        """The lifetime in a row of COLUMNS."""
        lifetime = lifetime_of(row)
        if lifetime.symbol.kind == MODULE:
            select = "SELECT function_table FROM module WHERE lifetime = ?"
            table = self._database.first(integer, select, lifetime.row)
            lifetime.functions = None if table is None else self._functions(table)
        return lifetime
