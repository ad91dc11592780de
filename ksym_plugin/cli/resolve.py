"""``ksym resolve``: names for addresses, as they were at a time."""

from __future__ import annotations

import contextlib
import string
import time
from collections.abc import Iterator
from typing import Any

import click

from ksym_plugin.cli import inputs, options
from ksym_plugin.cli.output import Dial, hexadecimal, say, write_json, write_lines
from ksym_plugin.history.locate import Choice, describe
from ksym_plugin.history.reader import BootHistory
from ksym_plugin.kernel.bpf_prog import LiveLines
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf.session import Live, Session, open_history
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Locator, Resolver
from ksym_plugin.timeline.symbols import EXACT, Frame, Reason
from ksym_plugin.timeline.timeline import Timeline

_UNRECORDED = "BPF symbols have no names here: there is no history of that time (see ksym record)"
_DIGITS = frozenset(string.hexdigits)


@click.command(
    name="resolve",
    short_help="Name addresses, as of a time.",
    epilog="Example: ksym resolve --at 5741.328403 0xffffffffc02d41c8",
)
@options.history
@options.at
@options.clock
@click.option("--chain", is_flag=True, help="They are one call chain, the leaf first.")
@options.vmlinux
@options.kernel_lines
@options.as_json
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
def command(
    history: Choice,
    at: int | None,
    clock: str | None,
    chain: bool,
    vmlinux: str | None,
    with_lines: bool,
    as_json: bool,
    addresses: tuple[str, ...],
) -> None:
    """Name kernel addresses as they were at a time, by default the latest that is covered.

    ADDRESS is hexadecimal; - reads addresses from stdin. Without a history, the live
    system answers. BPF programs that were compiled with -g come with the source line of
    the instruction; in a chain, callers with that of the call.
    """
    with open_history(history) as session, contextlib.ExitStack() as stack:
        lookup: BootHistory | Live | Timeline | None = session.lookup
        if session.history is not None:
            time_ns, statics = _recorded(session, session.history, at, clock, vmlinux is not None)
        else:
            if at is not None:
                say(_UNRECORDED)
            statics = Kallsyms.load_shown()
            lookup = inputs.timeline() if at is None else Live()
            time_ns = time.monotonic_ns()
        kernel, lines = inputs.open_kernel(vmlinux, with_lines, session.history, statics, stack)
        resolver = Resolver(lookup, kernel or statics)
        locator = Locator(LiveLines() if session.history is None else session.lines, lines)

        def resolve(address: int, is_leaf: bool) -> Frame | Reason:
            frame = resolver.resolve(address, time_ns)
            return locator.locate(frame, is_leaf) if isinstance(frame, Frame) else frame

        # Lazily: stdin may hold any number of addresses, and each is answered as it comes.
        found = (
            (address, resolve(address, depth == 0 or not chain))
            for depth, address in enumerate(_addresses(addresses))
        )
        if as_json:
            write_json([_entry(address, frame) for address, frame in found])
        else:
            write_lines(_line(address, frame) for address, frame in found)


def _recorded(
    session: Session, history: BootHistory, at: int | None, clock: str | None, has_image: bool
) -> tuple[int, Kallsyms | None]:
    """The time, and the static symbols if they are of the same boot."""
    time_ns = session.time(at, clock)
    if at is None:
        dial = Dial(history.clock_map(), clock)
        say(f"as of {dial.text(time_ns)} on the {dial.clock} clock, the end of the history")
    if session.is_this_boot:
        return time_ns, inputs.kallsyms()
    if not has_image:
        say(f"only BPF symbols have names here: the history is of {describe(history.boot)}")
    return time_ns, None


def _addresses(words: tuple[str, ...]) -> Iterator[int]:
    for word in words:
        if word != "-":
            yield _address(word)
            continue
        with click.open_file("-", errors="replace") as lines:
            for line in lines:
                yield from map(_address, line.split())


def _address(word: str) -> int:
    digits = word[2:] if word[:2] in ("0x", "0X") else word
    if not 0 < len(digits) <= 16 or not _DIGITS.issuperset(digits):
        raise KsymError(f"{word[:40]!r} is no address", "give up to 16 hexadecimal digits")
    return int(digits, 16)


def _line(address: int, frame: Frame | Reason) -> str:
    if not isinstance(frame, Frame):
        return f"{hexadecimal(address)}  [unknown]  {frame.text}"
    module = f" ({frame.module})" if frame.module else ""
    certainty = "" if frame.certainty == EXACT else f"  {frame.certainty}"
    more = ""
    if frame.location is not None:
        more = f"  {frame.location.file}:{frame.location.line}"
        more += f": {frame.location.text}" if frame.location.text else ""
    elif frame.traced is not None:
        more = f"  traces {frame.traced}"
    return f"{hexadecimal(address)}  {frame.name}+{frame.offset:#x}{module}{certainty}{more}"


def _entry(address: int, frame: Frame | Reason) -> dict[str, Any]:
    if not isinstance(frame, Frame):
        return {"address": hexadecimal(address), "name": None, "reason": frame.text}
    entry: dict[str, Any] = {"address": hexadecimal(address)}
    for field in ("name", "offset", "module", "kind", "certainty"):
        entry[field] = getattr(frame, field)
    if frame.location is not None:
        entry.update(file=frame.location.file, line=frame.location.line)
        if frame.location.text:
            entry["text"] = frame.location.text
    if frame.traced is not None:
        entry["traced"] = frame.traced
    return entry
