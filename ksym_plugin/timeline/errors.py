"""Errors that name a problem and its remedy.

An address without a name is never an exception: see ``symbols.Reason``. These errors mean
that a whole source of answers cannot be used.
"""

from __future__ import annotations


class KsymError(Exception):
    """A source of answers cannot be used.

    ``str(error)`` is one plain sentence: what is wrong (``problem``), then what to do about it
    (``remedy``).
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class SourceError(KsymError):
    """An event source cannot start or cannot go on (privilege, kernel support)."""


class KallsymsError(KsymError):
    """A kallsyms table cannot be read, or holds nothing that could name an address."""


class HistoryError(KsymError):
    """A history file cannot be used. The file has not been altered."""
