"""``ksym show``: which BPF symbol was where, and from when to when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import click

from ksym_plugin.cli import inputs, options
from ksym_plugin.cli.output import Dial, hexadecimal, plural, write_json, write_lines
from ksym_plugin.history.locate import Choice, describe
from ksym_plugin.history.reader import BootHistory, Session
from ksym_plugin.kernel import identity
from ksym_plugin.perf.session import clocks_now, open_history
from ksym_plugin.timeline.symbols import Lifetime, Loss

_ROW = "{:18}  {:>6}  {:>7}  {:24}  {:24}  {}"
_HEAD = _ROW.format("START", "SIZE", "PROGRAM", "LOADED", "UNLOADED", "NAME")


@click.command(
    name="show",
    short_help="List the symbols of a history.",
    epilog="Example: ksym show --at 5741.328403 'bpf_prog_*'",
)
@options.history
@options.at
@options.clock
@click.option("--all", "everything", is_flag=True, help="Whatever was there at any time.")
@options.as_json
@click.argument("pattern", default="")
def command(
    history: Choice,
    at: int | None,
    clock: str | None,
    everything: bool,
    as_json: bool,
    pattern: str,
) -> None:
    """List BPF symbols and modules: those live at a time, by default the latest that is covered.

    PATTERN is a part of the name, or a whole one with * and ?. A window in brackets says
    how much earlier it can have happened. Without a history, what is live now is listed.
    In JSON, times are nanoseconds on the clock and windows are [earliest, latest].
    """
    if everything and at is not None:
        raise click.UsageError("--all has no use for --at")
    glob = options.glob(pattern)
    with open_history(history) as session:
        recorded = session.history
        time_ns = None
        if recorded is None:
            if everything or at is not None:
                raise inputs.no_history()
            lives: Iterable[Lifetime] = inputs.lifetimes()
            dial = Dial(clocks_now(), clock)
        else:
            dial = Dial(recorded.clock_map(), clock)
            time_ns = None if everything else session.time(at, clock)
            lives = recorded.lifetimes(_like(glob)) if time_ns is None else recorded.live(time_ns)
        found = [life for life in lives if fnmatchcase(life.symbol.name, glob)]
        if as_json:
            symbols = [_symbol(life, dial, recorded) for life in found]
            write_json({**_facts(recorded, dial, time_ns), "symbols": symbols})
        else:
            write_lines(_head(recorded, dial, time_ns))
            write_lines(_table(found, dial))


def _like(glob: str) -> str:
    """A pattern for SQL's LIKE that matches at least what the glob does."""
    return "%" if "[" in glob else glob.replace("*", "%").replace("?", "_")


def _head(recorded: BootHistory | None, dial: Dial, time_ns: int | None) -> Iterator[str]:
    """What the history covers, and what it does not."""
    if recorded is None:
        host, release = identity.hostname(), identity.release()
        yield f"live system {host}, Linux {release}, times on the {dial.clock} clock"
        yield ""
        return
    yield f"history of {describe(recorded.boot)}, times on the {dial.clock} clock"
    for session in recorded.sessions:
        since, until = dial.text(session.started), dial.text(session.covered)
        yield f"  {since} to {until}  {session.source}, {_state(session)}"
    for loss in recorded.losses:
        count = "" if loss.count is None else f", {loss.count} lost"
        yield f"  gap {dial.text(loss.since)} to {dial.text(loss.until)}  {loss.cause}{count}"
    if time_ns is not None:
        covered = "" if recorded.covers(time_ns) else ", which is not covered"
        yield f"live at {dial.text(time_ns)}{covered}"
    yield ""


def _state(session: Session) -> str:
    if session.closed:
        return "closed"
    return "recording now" if session.writing else "recorder killed"


def _table(found: Iterable[Lifetime], dial: Dial) -> Iterator[str]:
    yield _HEAD
    for life in found:
        symbol = life.symbol
        size = symbol.end - symbol.start
        functions = life.functions
        module = "" if functions is None else f" (module, {plural(len(functions), 'name')})"
        yield _ROW.format(
            hexadecimal(symbol.start),
            f"<={size}" if life.open_ended else size,
            "-" if life.prog_id is None else life.prog_id,
            dial.window(life.loaded_earliest, life.loaded_latest),
            dial.window(life.unloaded_earliest, life.unloaded_latest),
            symbol.name + module,
        )


def _facts(recorded: BootHistory | None, dial: Dial, time_ns: int | None) -> dict[str, Any]:
    if recorded is None:
        return {"history": None, "clock": dial.clock}
    boot = recorded.boot
    facts = {"host": boot.host, "release": boot.release, "build_id": boot.build_id}
    return {
        "boot": {"id": boot.boot_id, **facts},
        "clock": dial.clock,
        "at": None if time_ns is None else dial.of(time_ns),
        "covered": None if time_ns is None else recorded.covers(time_ns),
        "sessions": [_session(session, dial) for session in recorded.sessions],
        "gaps": [_gap(loss, dial) for loss in recorded.losses],
    }


def _session(session: Session, dial: Dial) -> dict[str, Any]:
    return {
        "source": session.source,
        "started": dial.of(session.started),
        "covered": dial.of(session.covered),
        "closed": session.closed,
        "writing": session.writing and not session.closed,
        "killed": session.killed,
    }


def _gap(loss: Loss, dial: Dial) -> dict[str, Any]:
    since, until = dial.of(loss.since), dial.of(loss.until)
    return {"since": since, "until": until, "cause": loss.cause, "count": loss.count}


def _details(life: Lifetime, dial: Dial, recorded: BootHistory | None) -> dict[str, Any]:
    """The details of a symbol's program, if the history has any."""
    program = None if recorded is None else recorded.programs.of(life)
    if program is None:
        return {}
    is_known = bool(program.tag)
    return {
        "details": {
            "tag": program.tag or None,
            "type": program.type if is_known else None,
            "uid": program.uid if is_known else None,
            "load_time": dial.of(program.load_time) if is_known else None,
            "has_lines": program.table is not None,
            "problem": program.problem or None,
        }
    }


def _symbol(life: Lifetime, dial: Dial, recorded: BootHistory | None) -> dict[str, Any]:
    symbol = life.symbol
    first, last = life.unloaded_earliest, life.unloaded_latest
    functions = {} if life.functions is None else {"names": len(life.functions)}
    return {
        "start": hexadecimal(symbol.start),
        "end": hexadecimal(symbol.end),
        "end_is_bound": life.open_ended,
        "name": symbol.name,
        "kind": symbol.kind,
        "module": symbol.module,
        "program": life.prog_id,
        "pid": life.pid,
        "comm": life.comm,
        "loaded": [
            dial.of(life.loaded_earliest) if life.loaded_earliest > 0 else None,
            dial.of(life.loaded_latest),
        ],
        "unloaded": None if first is None or last is None else [dial.of(first), dial.of(last)],
        **functions,
        **_details(life, dial, recorded),
    }
