"""How results and messages are written."""

from __future__ import annotations

import json
import sys

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import IO, Any


class Failure(click.ClickException):
    """What cannot be done: one sentence on stderr, exit status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        say(self.message)


def say(sentence: str) -> None:
    """Tell the user something that is no result."""
    click.echo(f"ksym: {clean(sentence)}", err=True)


def clean(text: str) -> str:
    """``text`` on one line and without anything a terminal would obey.

    Names come from whoever loaded the program, and histories from whoever wrote them.
    """
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def write_lines(lines: Iterable[str]) -> None:
    """Write results, each on a line of its own and clean."""
    write = sys.stdout.write
    for line in lines:
        write(clean(line) + "\n")


def write_json(value: object) -> None:
    """Write a result for a program; addresses in it are ``hexadecimal`` strings."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def hexadecimal(address: int) -> str:
    return f"{address:#018x}"


def plural(number: int, noun: str) -> str:
    """``1 change``, ``2 changes``, ``2 losses``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"
