"""Modules in a history: which functions are in the code that a lifetime stands for.

Function tables are kept once for all modules that have the same.
"""

from __future__ import annotations

from ksym_plugin.history_file import query
from ksym_plugin.timeline.packed import PackedFunctions

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable
    from typing import Final

    from ksym_plugin.timeline.symbols import Lifetime

_TABLE: Final = "INSERT OR IGNORE INTO function_table (digest, data) VALUES (?, ?)"
_MODULE: Final = (
    "INSERT OR REPLACE INTO module VALUES (?, (SELECT id FROM function_table WHERE digest = ?))"
)
_FORGET_MODULES: Final = "DELETE FROM module WHERE lifetime NOT IN (SELECT id FROM lifetime)"
_FORGET_TABLES: Final = (
    "DELETE FROM function_table WHERE id NOT IN (SELECT function_table FROM module)"
)


def write(database: sqlite3.Connection, modules: Iterable[tuple[int, PackedFunctions]]) -> None:
    """Write the functions of lifetimes, which are given by row."""
    for row, functions in modules:
        digest = functions.digest
        database.execute(_TABLE, (digest, functions.data))
        database.execute(_MODULE, (row, digest))


def forget_orphans(database: sqlite3.Connection) -> None:
    """Drop modules without a lifetime, and tables without a module."""
    database.execute(_FORGET_MODULES)
    database.execute(_FORGET_TABLES)


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
            table = self._tables[number] = PackedFunctions(rows[0][0] if rows else b"")
        return table
