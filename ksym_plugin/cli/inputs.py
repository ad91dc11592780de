"""What commands read: the running system, a history, the kernel's file, and perf's text."""

from __future__ import annotations

import contextlib
import os
import re

import click

from ksym_plugin.cli.output import say
from ksym_plugin.history import locate
from ksym_plugin.kernel import identity, privileges, snapshot, vmlinux
from ksym_plugin.kernel.clocks import BOOTTIME, MONOTONIC, PERF, REALTIME
from ksym_plugin.kernel.elf import ElfError
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.kernel.vmlinux import check_image, open_image, open_lines
from ksym_plugin.perf import data, session
from ksym_plugin.perf.data import MAGIC
from ksym_plugin.perf.repaint import Renamer
from ksym_plugin.perf.session import VARIABLE, Live, Session
from ksym_plugin.perf.text import BOM
from ksym_plugin.timeline.errors import HistoryError, KallsymsError, KsymError, SourceError
from ksym_plugin.timeline.symbols import Lifetime
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from ksym_plugin.history.reader import BootHistory
    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.kernel.vmlinux import Image

_SIZE = 1 << 20
#: What ``perf script --header`` prints before everything else.
_HOST = re.compile(rb"^# hostname : (\S+)", re.MULTILINE)
_RELEASE = re.compile(rb"^# os release : (\S+)", re.MULTILINE)
#: It begins and ends with this.
_RULER = b"# ========"
_CLOCKID = re.compile(rb"^# event : .*use_clockid = 1.*clockid = (-?\d+)", re.MULTILINE)
_CLOCKS = {b"0": REALTIME, b"1": MONOTONIC, b"7": BOOTTIME}


def lifetimes() -> list[Lifetime]:
    """What BPF symbols the kernel holds now. SourceError if it does not tell."""
    taken = snapshot.take()
    if taken.limit:
        say(taken.limit)
    return [Lifetime(load) for load in taken.loads]


def timeline() -> Timeline | None:
    """The same as a timeline that answers for now; None, and said why, if it is not told."""
    table = Timeline()
    try:
        for lifetime in lifetimes():
            table.enter(lifetime)
    except SourceError as error:
        say(f"BPF programs have names only as kallsyms lists them: {error}")
        return None
    return table


def kallsyms(needed: bool) -> Kallsyms | None:
    """The static symbols of this kernel. Where they are ``needed``, KallsymsError without them."""
    try:
        table = Kallsyms.load()
        if table.hidden:
            raise KallsymsError(
                "kernel addresses are hidden from this user", privileges.SHOW_ADDRESSES
            )
    except KallsymsError as error:
        if needed:
            raise
        say(f"only BPF symbols have names here: {error}")
        return None
    return table


def open_history(explicit: str | None) -> Session:
    """The session of one boot in the history, this system's if it can be; empty without any.

    Says which boot that is where there are several, and what the history lacks.
    """
    return session.open_history(locate.find(explicit, None), say)


def no_history() -> KsymError:
    return HistoryError(
        "there is no history to look back into", "make one with ksym record, or name one with -H"
    )


def open_kernel(
    path: str | None,
    with_lines: bool,
    known: BootHistory | None,
    statics: Kallsyms | None,
    stack: contextlib.ExitStack,
) -> tuple[Image | None, ImageLines | None]:
    """The image that runs, or ran when the history was recorded; and its lines if wanted.

    ElfError where the file is of another build. debuginfod is asked only if there is no
    file, lines are wanted and $DEBUGINFOD_URLS is set.
    """
    build_id = identity.build_id() if known is None else known.boot.build_id
    text_start = None if statics is None else statics.text_start
    if known is not None and known.boot.text_start is not None:
        text_start = known.boot.text_start
    if path is None:
        if not with_lines:
            return None, None
        if not vmlinux.has_servers():
            raise ElfError(
                "lines of kernel functions need the kernel's debug information",
                f"name its vmlinux with --vmlinux, or servers in ${vmlinux.SERVERS}",
            )
        path = vmlinux.download(build_id or "")
    image = open_image(path, text_start, build_id, statics, say)
    lines = open_lines(image, say) if with_lines else None
    if lines is not None:
        stack.callback(lines.close)
    return image, lines


def vmlinux_for_data(path: str | None, with_lines: bool, data_path: str | None) -> str | None:
    """The file to name to the handler: ``path``, or what a debuginfod server has.

    ElfError where ``path`` cannot be of the kernel that the data tells of. Servers are asked
    only if lines are wanted and there are some; that they do not help is said, no error.
    """
    recorded = data.read(data_path or "perf.data")
    if path is not None:
        check_image(path, recorded.text_start, recorded.build_id)
        return path
    build_id = recorded.build_id
    if not (with_lines and vmlinux.has_servers() and build_id and recorded.text_start):
        return None
    try:
        found = vmlinux.download(build_id)
        check_image(found, recorded.text_start, build_id)
    except KsymError as error:
        say(f"only BPF frames get source lines: {error}")
        return None
    return found


def environment() -> dict[str, str]:
    """What tells the handler, in another Python, where pyelftools is."""
    import elftools

    return {VARIABLE: os.path.dirname(os.path.abspath(elftools.__file__))}


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
def open_text(path: str) -> Iterator[Text]:
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
    origin = locate.Origin("text", release=text.release, host=text.host)
    with session.open_history(path, tell, origin) as opened:
        yield opened.renamer(chosen, _statics)


def _statics() -> Kallsyms | None:
    return kallsyms(needed=False)


def running() -> Renamer:
    """What renames frames by the running system alone, if perf's names agree with it."""
    clocks = session.clocks_now()
    return Renamer(None, clocks if clocks.knows(PERF) else None, None, _running, doubt=True)


def _running() -> tuple[Live | None, Kallsyms | None]:
    loaded = timeline()
    return (None if loaded is None else Live(loaded)), _statics()
