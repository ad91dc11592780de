"""Text that perf printed: reading it as it comes, and what it says of where it is from."""

from __future__ import annotations

import contextlib
import re

import click

from ksym_plugin.cli import live, lookup
from ksym_plugin.cli.output import say
from ksym_plugin.history import locate
from ksym_plugin.history.reader import History
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import BOOTTIME, MONOTONIC, PERF, REALTIME, ClockMap
from ksym_plugin.perf.data import MAGIC
from ksym_plugin.perf.repaint import Renamer
from ksym_plugin.perf.session import Live
from ksym_plugin.perf.text import BOM
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Final

    from ksym_plugin.history.reader import Past
    from ksym_plugin.kernel.kallsyms import Kallsyms

_SIZE: Final = 1 << 20
#: What ``perf script --header`` prints before everything else.
_HOST: Final = re.compile(rb"^# hostname : (\S+)", re.MULTILINE)
_RELEASE: Final = re.compile(rb"^# os release : (\S+)", re.MULTILINE)
#: It begins and ends with this.
_RULER: Final = b"# ========"
_CLOCKID: Final = re.compile(rb"^# event : .*use_clockid = 1.*clockid = (-?\d+)", re.MULTILINE)
_CLOCKS: Final = {b"0": REALTIME, b"1": MONOTONIC, b"7": BOOTTIME}


class Text:
    """A text and how it begins: its header is read, and what that says.

    ``host`` and ``release`` are None, and ``clock`` perf's own, where there is no header.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._first = piece = self._read()
        while piece and _is_header(self._first) and len(self._first) < _SIZE:
            piece = self._read()
            self._first += piece
        if self._first.startswith(MAGIC):
            raise KsymError(
                "this is what perf recorded, not the text that perf script prints of it",
                "use ksym script -i FILE, or: perf script -i FILE | ksym ...",
            )
        self.host = _found(_HOST, self._first)
        self.release = _found(_RELEASE, self._first)
        clock = _CLOCKID.search(self._first)
        #: None for a clock that no history can place.
        self.clock = PERF if clock is None else _CLOCKS.get(clock[1])

    def pieces(self) -> Iterator[bytes]:
        """The text from its beginning, a piece as soon as there is one."""
        piece = self._first
        while piece:
            yield piece
            piece = self._read()

    def _read(self) -> bytes:
        # Whatever is there, however little: who pipes into this may pause. What click opens
        # is buffered, which it does not tell.
        piece: bytes = self._stream.read1(_SIZE)  # type: ignore[attr-defined]
        return piece


def _is_header(text: bytes) -> bool:
    """Whether a text that begins so is all header yet, and has more of it to come."""
    lines = text[len(BOM) if text.startswith(BOM) else 0 :].splitlines()
    are_comments = bool(lines) and all(line.startswith(b"#") for line in lines)
    return are_comments and lines.count(_RULER) < 2


def _found(pattern: re.Pattern[bytes], text: bytes) -> str | None:
    found = pattern.search(text)
    return None if found is None else found[1].decode("utf-8", "surrogateescape")


@contextlib.contextmanager
def opened(path: str) -> Iterator[Text]:
    """A text from a file, or from stdin for ``-``."""
    with click.open_file(path, "rb") as stream:
        yield Text(stream)


@contextlib.contextmanager
def renamer(
    text: Text, history: str | None, clock: str | None, tell: Callable[[str], None] = say
) -> Iterator[Renamer | None]:
    """What renames the frames of a text by the history; None if there is no history."""
    path = locate.find(history, None)
    if path is None:
        yield None
        return
    chosen = clock or text.clock
    if chosen is None:
        raise KsymError(
            "the text's times are on a clock that a history cannot place",
            "record with: perf record -k CLOCK_MONOTONIC",
        )
    with History(path) as opened_history:
        past = _past(opened_history, text, tell)
        is_here = lookup.is_of_this_boot(past)
        yield Renamer(
            past,
            past.clock_map(),
            chosen,
            _statics if is_here else None,
            follow=_follower(past) if is_here else None,
        )


def _past(history: History, text: Text, tell: Callable[[str], None]) -> Past:
    """The record of the boot that the text can be from."""
    here = identity.boot_id()
    boot = locate.choose_boot(history, here, release=text.release, host=text.host)
    return locate.record_of(history, boot, "text", tell)


def _follower(past: Past) -> Callable[[int], tuple[int, ClockMap]] | None:
    """For a history that is being written: waits until it covers a time."""
    if not any(session.writing for session in past.sessions):
        return None

    def follow(until: int) -> tuple[int, ClockMap]:
        past.wait_covered(until)
        covered = max((session.covered for session in past.sessions), default=0)
        return covered, past.clock_map()

    return follow


def _statics() -> tuple[None, Kallsyms | None]:
    return None, live.kallsyms(needed=False)


def running() -> Renamer:
    """What renames frames by the running system alone, if perf's names agree with it."""
    clocks = lookup.clocks_now()
    return Renamer(None, clocks if clocks.knows(PERF) else None, None, _running, doubt=True)


def _running() -> tuple[Live | None, Kallsyms | None]:
    loaded = live.timeline()
    return (None if loaded is None else Live(loaded)), live.kallsyms(needed=False)
