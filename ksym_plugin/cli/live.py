"""The live system, for whoever has no history."""

from __future__ import annotations

from ksym_plugin.cli.output import say
from ksym_plugin.kernel import snapshot
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline.errors import KallsymsError, SourceError
from ksym_plugin.timeline.symbols import OUTSIDE_HISTORY, Lifetime
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.timeline import Answer

_HIDDEN = KallsymsError(
    "kernel addresses are hidden from this user",
    "run as root or with CAP_SYSLOG, and set kernel.kptr_restrict below 2 "
    "(sysctl kernel.kptr_restrict=1)",
)


class Unrecorded:
    """A past of which nothing is known: BPF names of now say nothing about then."""

    __slots__ = ()
    extent = 0
    has_modules = False

    def at(self, address: int, time_ns: int, /) -> Answer:
        return None, OUTSIDE_HISTORY


def lifetimes() -> list[Lifetime]:
    """What BPF symbols the kernel holds now. SourceError if it does not tell."""
    taken = snapshot.take()
    if taken.limit:
        say(taken.limit)
    return [Lifetime(load) for load in taken.loads]


def timeline() -> Timeline | None:
    """The same as a past that answers for now; None, and said why, if it is not told."""
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
            raise _HIDDEN
    except KallsymsError as error:
        if needed:
            raise
        say(f"only BPF symbols have names here: {error}")
        return None
    return table
