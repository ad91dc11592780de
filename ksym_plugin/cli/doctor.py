"""``ksym doctor``: what this kernel and this user allow, and how to get the rest."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Callable

import click

from ksym_plugin.cli import options
from ksym_plugin.cli.output import length, plural, write_json, write_lines
from ksym_plugin.history import locate
from ksym_plugin.history.reader import History
from ksym_plugin.kernel import identity, kallsyms, privileges
from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.kernel.worker import ask
from ksym_plugin.sources import NAMES, open_source
from ksym_plugin.timeline.errors import KsymError

#: Looks at one thing and says what it found. KsymError if that thing is missing.
Question = Callable[[], str]
_SYSCTLS = "/proc/sys/net/core"
#: How long a kernel may take; listing ten thousand programs takes a few seconds.
_ASK_SECONDS = 15.0
#: Two sources have a program compiled first, which takes a second, or twenty if emulated.
_COMPILE_SECONDS = 90.0
_COMPILED = frozenset(("kprobe", "fentry"))


@click.command(
    name="doctor",
    short_help="Say what works here, and how to get the rest.",
    epilog="Example: ksym doctor",
)
@options.history
@options.as_json
def command(history: locate.Choice, as_json: bool) -> None:
    """Say what this kernel and this user allow, and how to get what is missing.

    The exit status is 0 if recording is possible.
    """
    checks = list(_checks(history))
    sources = [check for check in checks if check["name"].startswith("source ")]
    can_record = any(check["state"] == "ok" for check in sources)
    if as_json:
        write_json({"recording": can_record, "checks": checks})
    else:
        for check in checks:
            remedy = f"; {check['remedy']}" if check["remedy"] else ""
            write_lines([f"{check['state']:7}  {check['name']}: {check['finding']}{remedy}"])
    raise click.exceptions.Exit(0 if can_record else 1)


def _checks(history: locate.Choice) -> Iterator[dict[str, str]]:
    for name in NAMES:
        seconds = _COMPILE_SECONDS if name in _COMPILED else _ASK_SECONDS
        yield _check(f"source {name}", partial(_source, name), seconds)
    yield _check("bpf(2)", _programs, _ASK_SECONDS)
    yield _check("kallsyms", _kallsyms)
    yield _check("perf's clock", _clock)
    yield _check("perf", _perf)
    yield _check("history", partial(_history, history))
    yield _check("BPF JIT", _jit)
    yield _check("BPF in kallsyms", _listing)


def _check(name: str, question: Question, seconds: float | None = None) -> dict[str, str]:
    """Look at one thing; ``remedy`` is empty where nothing is to be done.

    With ``seconds`` the kernel may never answer: then it is asked in a process of its own.
    """
    state, remedy = "missing", ""
    try:
        finding = question() if seconds is None else ask(question, seconds)
        state = "ok"
    except KsymError as error:
        finding, remedy = error.problem, error.remedy
    except TimeoutError:
        finding = "bpf(2) or perf_event_open(2) does not come back"
        remedy = "restart this machine: no program can mend a kernel that hangs there"
    except (EOFError, OSError):
        finding, remedy = "the check died", "report this with the kernel's release"
    return {"name": name, "state": state, "finding": finding, "remedy": remedy}


def _source(name: str) -> str:
    try:
        source, _ = open_source(name)
    except KsymError as error:
        problem = error.problem.partition(": ")[2] or error.problem
        raise KsymError(problem, error.remedy) from None
    try:
        # What a recorder does first: a source that cannot do it is of no use.
        source.snapshot()
    except KsymError as error:
        raise KsymError(f"starts, but {error.problem}", error.remedy) from None
    finally:
        source.close()
    return "; ".join(["starts", *source.notes])


def _programs() -> str:
    found = list(ProgramReader().newer_than(0))
    if any(program.hidden for program in found):
        raise privileges.programs_hidden()
    return f"lists {plural(len(found), 'program')}"


def _kallsyms() -> str:
    if kallsyms.text_start() is None:
        raise KsymError("kernel addresses are hidden", privileges.SHOW_ADDRESSES)
    return "kernel addresses can be read"


def _clock() -> str:
    with contextlib.closing(PerfClock()) as clock:
        if clock.read().perf is None:
            problem = clock.problem or "perf's clock cannot be read"
            raise KsymError(problem, privileges.READ_PERF_CLOCK)
    return "can be read"


def _perf() -> str:
    try:
        done = subprocess.run(
            ["perf", "version", "--build-options"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KsymError("it does not come back", "see what keeps perf waiting") from None
    except OSError as error:
        raise KsymError(
            f"it cannot be run ({error.strerror})", "install it (Debian: apt install linux-perf)"
        ) from None
    # "             libpython: [ on  ]  # HAVE_LIBPYTHON_SUPPORT"; newer ones may not have the line.
    if re.search(rb"^\s*libpython\s*:.*\bon\b", done.stdout, re.MULTILINE):
        return "is there"
    return "is there, without libpython: all works but perf script -s, which ksym does not need"


def _history(choice: locate.Choice) -> str:
    path = locate.find(choice, None)
    if path is None:
        raise KsymError("there is none yet", "make one with: ksym record")
    with History(path) as history:
        boot = locate.preferred(history.boots())
        if boot is None:
            raise KsymError(f"{path} is empty", "fill it with: ksym record")
        if boot.boot_id != identity.boot_id():
            problem = f"{path} has nothing of this boot, but of {locate.describe(boot)}"
            raise KsymError(problem, "record this boot with: ksym record")
        recorded = history.recorded(boot)
    sessions = recorded.sessions
    covered = sum(session.covered - session.started for session in sessions)
    killed = sum(session.killed for session in sessions)
    finding = f"{path} covers {length(covered)} in {plural(len(sessions), 'session')}"
    finding += f", {plural(len(recorded.losses), 'gap')}"
    if any(session.writing and not session.closed for session in sessions):
        finding += ", recording now"
    return finding + (f", {plural(killed, 'recorder')} killed" if killed else "")


def _jit() -> str:
    if _switch("bpf_jit_enable") == "0":
        raise KsymError(
            "it is off, so programs have no addresses",
            "turn it on with: sysctl net.core.bpf_jit_enable=1",
        )
    return "is on"


def _listing() -> str:
    """The JIT's switches may keep programs out of kallsyms."""
    try:
        is_hardened = _switch("bpf_jit_harden") != "0"
    except KsymError:
        is_hardened = False
    if is_hardened or _switch("bpf_jit_kallsyms") == "0":
        raise KsymError(
            "is not listed, so trampolines and other images have no names",
            privileges.LIST_PROGRAMS,
        )
    return "is listed"


def _switch(name: str) -> str:
    """A sysctl's value. KsymError where it is not there or not for this user."""
    try:
        with open(f"{_SYSCTLS}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        raise KsymError(
            "its switch cannot be read", "run as root, in the host's network namespace"
        ) from None
