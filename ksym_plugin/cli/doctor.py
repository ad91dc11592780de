"""``ksym doctor``: what this kernel and this user allow, and how to get the rest."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import click

from ksym_plugin.cli import options
from ksym_plugin.cli.output import length, plural, write_json, write_lines
from ksym_plugin.cli.script import perf_problem
from ksym_plugin.history import locate
from ksym_plugin.history.reader import History
from ksym_plugin.kernel import identity, kallsyms, privileges
from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.kernel.worker import ask
from ksym_plugin.sources import names, open_source
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_SYSCTLS = "/proc/sys/net/core"
#: How long a kernel may take; listing ten thousand programs takes a few seconds.
_ASK_SECONDS = 15.0
#: Two sources have a program compiled first, which takes a second, or twenty if emulated.
_COMPILE_SECONDS = 90.0
_COMPILED = frozenset(("kprobe", "fentry"))
_HANGS = "bpf(2) or perf_event_open(2) does not come back"
_HANGS_REMEDY = "restart this machine: no program can mend a kernel that hangs there"
_JIT_REMEDY = "turn it on with: sysctl net.core.bpf_jit_enable=1"
_SWITCH_REMEDY = "run as root, in the host's network namespace"


class Check(NamedTuple):
    """One thing that was looked at; ``remedy`` is empty where nothing is to be done."""

    name: str
    fine: bool
    finding: str
    remedy: str = ""

    @property
    def state(self) -> str:
        return "ok" if self.fine else "missing"

    def sentence(self) -> str:
        return f"{self.finding}; {self.remedy}" if self.remedy else self.finding


def run_all(history: str | None) -> list[Check]:
    return [
        *(_guarded(f"source {name}", partial(_source, name), _seconds(name)) for name in names()),
        _guarded("bpf(2)", _programs),
        _kallsyms(),
        _clock(),
        _perf(),
        _history(history),
        *_jit(),
    ]


def _seconds(source: str) -> float:
    return _COMPILE_SECONDS if source in _COMPILED else _ASK_SECONDS


def _guarded(
    name: str, question: Callable[[], tuple[bool, str, str]], seconds: float = _ASK_SECONDS
) -> Check:
    """A check that the kernel may never answer."""
    try:
        return Check(name, *ask(question, seconds))
    except TimeoutError:
        return Check(name, False, _HANGS, _HANGS_REMEDY)
    except (EOFError, KsymError, OSError):
        return Check(name, False, "the check died", "report this with the kernel's release")


def _source(name: str) -> tuple[bool, str, str]:
    try:
        source, _ = open_source(name)
    except KsymError as error:
        return False, error.problem.partition(": ")[2] or error.problem, error.remedy
    try:
        # What a recorder does first: a source that cannot do it is of no use.
        source.snapshot()
    except KsymError as error:
        return False, f"starts, but {error.problem}", error.remedy
    finally:
        source.close()
    return True, "; ".join(["starts", *source.notes]), ""


def _programs() -> tuple[bool, str, str]:
    try:
        found = list(ProgramReader().newer_than(0))
    except KsymError as error:
        return False, error.problem, error.remedy
    if any(program.hidden for program in found):
        hidden = privileges.programs_hidden()
        return False, hidden.problem, hidden.remedy
    return True, f"lists {plural(len(found), 'program')}", ""


def _kallsyms() -> Check:
    if kallsyms.text_start() is None:
        return Check("kallsyms", False, "kernel addresses are hidden", privileges.SHOW_ADDRESSES)
    return Check("kallsyms", True, "kernel addresses can be read")


def _clock() -> Check:
    clock = PerfClock()
    try:
        if clock.problem or clock.read().perf is None:
            problem = clock.problem or "perf's clock cannot be read"
            return Check("perf's clock", False, problem, privileges.READ_PERF_CLOCK)
    finally:
        clock.close()
    return Check("perf's clock", True, "can be read")


def _perf() -> Check:
    problem, remedy = perf_problem()
    return Check("perf", not problem, problem or "runs Python scripts", remedy)


def _history(explicit: str | None) -> Check:
    path = locate.find(explicit, None)
    if path is None:
        return Check("history", False, "there is none yet", "make one with: ksym record")
    try:
        with History(path) as history:
            return _state_of(history)
    except KsymError as error:
        return Check("history", False, error.problem, error.remedy)


def _state_of(history: History) -> Check:
    boot = locate.choose_boot(history.boots())
    if boot is None:
        return Check("history", False, f"{history.path} is empty", "fill it with: ksym record")
    past = history.recorded(boot)
    if boot.boot_id != identity.boot_id():
        finding = f"{history.path} has nothing of this boot, but of {locate.describe(boot)}"
        return Check("history", False, finding, "record this boot with: ksym record")
    covered = sum(session.covered - session.started for session in past.sessions)
    killed = sum(session.killed for session in past.sessions)
    parts = [
        f"{history.path} covers {length(covered)} in {plural(len(past.sessions), 'session')}",
        plural(len(past.losses), "gap"),
    ]
    if any(session.writing and not session.closed for session in past.sessions):
        parts.append("recording now")
    if killed:
        parts.append(f"{plural(killed, 'recorder')} killed")
    return Check("history", True, ", ".join(parts))


def _jit() -> list[Check]:
    """The JIT's switches: without it no program has an address, and kallsyms may hide names."""
    enabled = _switch("bpf_jit_enable")
    listed = _switch("bpf_jit_kallsyms")
    hardened = _switch("bpf_jit_harden")
    jit = Check("BPF JIT", True, "is on")
    if enabled == "0":
        jit = Check("BPF JIT", False, "it is off, so programs have no addresses", _JIT_REMEDY)
    elif not enabled:
        jit = Check("BPF JIT", False, "its switch cannot be read", _SWITCH_REMEDY)
    listing = Check("BPF in kallsyms", True, "is listed")
    if listed == "0" or hardened not in ("0", ""):
        found = "is not listed, so trampolines and other images have no names"
        listing = Check("BPF in kallsyms", False, found, privileges.LIST_PROGRAMS)
    elif not listed:
        listing = Check("BPF in kallsyms", False, "its switch cannot be read", _SWITCH_REMEDY)
    return [jit, listing]


def _switch(name: str) -> str:
    """A sysctl's value; empty where it is not there or not for this user."""
    try:
        with open(f"{_SYSCTLS}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@click.command(
    name="doctor",
    short_help="Say what works here, and how to get the rest.",
    epilog="Example: ksym doctor",
)
@options.history
@options.as_json
@click.pass_context
def command(ctx: click.Context, history: str | None, as_json: bool) -> None:
    """Say what this kernel and this user allow, and how to get what is missing.

    The exit status is 0 if recording is possible.
    """
    results = run_all(history)
    possible = any(check.fine for check in results if check.name.startswith("source "))
    if as_json:
        checks = [
            {
                "name": check.name,
                "state": check.state,
                "finding": check.finding,
                "remedy": check.remedy,
            }
            for check in results
        ]
        write_json({"recording": possible, "checks": checks})
    else:
        write_lines(f"{check.state:7}  {check.name}: {check.sentence()}" for check in results)
    ctx.exit(0 if possible else 1)
