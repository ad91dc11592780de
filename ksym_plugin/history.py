"""The timeline kept in an SQLite file: looking back.

One row a lifetime and one a session of recording; several boots and several hosts fit
in one file, and a look-up never crosses a boot. Readers may open the file while it is
written (WAL). What a dead writer left is readable as it is: its session counts as
covered up to its last commit and as unknown after that.
"""

from __future__ import annotations

from ksym_plugin.boots import Boot
from ksym_plugin.history_file import check_format, connect_read_only, query, unsigned
from ksym_plugin.past import Past


class History:
    """A history file, opened for reading. Raises HistoryError if it cannot be used."""

    def __init__(self, path: str) -> None:
        self.path = path
        check_format(path)
        self._database = connect_read_only(path)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def boots(self) -> list[Boot]:
        """The boots in the file, the one recorded last at the end."""
        rows = query(
            self._database,
            self.path,
            "SELECT b.id, boot_id, host, release, build_id, text_start FROM boot b"
            " JOIN session s ON s.boot = b.id GROUP BY b.id ORDER BY max(s.id)",
        )
        return [
            Boot(row, boot_id, host, release, build_id, text and unsigned(text))
            for row, boot_id, host, release, build_id, text in rows
        ]

    def past(self, boot: Boot) -> Past:
        """Everything recorded in one boot."""
        return Past(self._database, self.path, boot)
