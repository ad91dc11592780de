"""Which history to use, and which boot in it: finding and opening it for a reader."""

from __future__ import annotations

import os
import time

from ksym_plugin.history.reader import Boot, History
from ksym_plugin.kernel import identity, kallsyms
from ksym_plugin.timeline.errors import HistoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ksym_plugin.history.reader import BootHistory
    from ksym_plugin.kernel.clocks import ClockMap

#: Names a history for every command of a shell or a service.
VARIABLE = "KSYM_HISTORY"
#: What ``ksym record`` writes, and what is looked for beside a perf.data.
BESIDE = "ksym.db"
#: What the recorder writes that runs as a service.
SYSTEM = "/var/lib/ksym/history.db"
#: Clocks are read apart, so a sample may seem to be ahead of now: by less than this, in ns.
_AHEAD = 1_000_000_000
#: Functions of a kernel's image lie within so many bytes of its start.
_IMAGE = 1 << 27
#: How many boots an error lists.
_MOST_LISTED = 12


class Choice:
    """The history that a user asks for, and the boot in it; None for what is left open.

    ``boot`` is the number that a boot has in the file, or the beginning of its id.
    """

    def __init__(self, path: str | None = None, boot: str | None = None) -> None:
        self.path = path
        self.boot = boot


def find(choice: Choice, data_path: str | None) -> str | None:
    """The history to use: the chosen, $KSYM_HISTORY, ksym.db beside the data, the system's.

    ``data_path`` is the perf.data's; None or ``-`` (a pipe) stands for the working directory.
    What was asked for by name need not be there: opening it says what is wrong. None if there
    is no history.
    """
    asked = choice.path or os.environ.get(VARIABLE)
    if asked:
        return asked
    folder = os.path.dirname(data_path) if data_path and data_path != "-" else ""
    for path in (os.path.join(folder, BESIDE), SYSTEM):
        if _is_there(path):
            return path
    return None


def _is_there(path: str) -> bool:
    """Whether there is a file, or may be: without permission to look, opening it says so."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


class Origin:
    """What is known of the boot that data is from; None for what is not.

    ``data`` is its name in errors. ``text_start`` is the address of ``_text``, which differs
    from boot to boot with KASLR; ``core`` are where perf saw functions of the kernel's image.
    ``times`` are the first and the last time of a sample in ns, by each clock that they can be
    on; empty where samples have none. ``this_boot_only``: it is of no use to any other boot.
    """

    def __init__(
        self,
        data: str,
        *,
        build_id: str | None = None,
        release: str | None = None,
        host: str | None = None,
        text_start: int | None = None,
        core: tuple[int, ...] | None = None,
        times: Mapping[str, tuple[int, int]] | None = None,
        this_boot_only: bool = False,
    ) -> None:
        self.data = data
        self.build_id = build_id
        self.release = release
        self.host = host
        self.text_start = text_start
        self.core = core
        self.times = times
        self.this_boot_only = this_boot_only

    def is_of_kernel(self, boot: Boot) -> bool:
        """Whether nothing that is known of both kernels differs."""
        if self.core is not None and boot.text_start is not None:
            # Not all: perf calls by the image's symbols what lies elsewhere, too.
            image = range(boot.text_start, boot.text_start + _IMAGE)
            if 2 * sum(address in image for address in self.core) <= len(self.core):
                return False
        here = (self.build_id, self.text_start, self.release)
        there = (boot.build_id, boot.text_start, boot.release)
        return not any(map(_differ, here, there))

    def fits(self, boot: Boot) -> bool:
        """Whether it can be from a boot, by the kernel and the host.

        A container has a host name of its own, so the name counts only where the address does
        not tell: a fleet has one build on many hosts.
        """
        return self.is_of_kernel(boot) and (
            None not in (self.text_start, boot.text_start) or not _differ(self.host, boot.host)
        )

    def can_be_of_now(self, clock_map: ClockMap) -> bool:
        """Whether this system has come to the times of the samples, by one of the clocks."""
        now = time.monotonic_ns() + _AHEAD
        spans = self._spans(clock_map)
        return not spans or any(last <= now for _, last in spans)

    def is_covered(self, recorded: BootHistory) -> bool:
        """Whether a boot's record has something of the times of the samples."""
        return any(recorded.overlaps(*span) for span in self._spans(recorded.clock_map()))

    def _spans(self, clock_map: ClockMap) -> list[tuple[int, int]]:
        """From when to when samples were taken, CLOCK_MONOTONIC ns, by each of the clocks."""
        return [
            clock_map.window(clock, *times)
            for clock, times in (self.times or {}).items()
            if clock_map.knows(clock)
        ]

    def other_host(self, boot: Boot) -> list[str]:
        """A sentence about a host's name that is not the boot's, if so."""
        if not _differ(self.host, boot.host):
            return []
        return [f"the {self.data} is of the kernel of {boot.host}, under the host name {self.host}"]


def _differ(one: object, other: object) -> bool:
    return one is not None and other is not None and one != other


def running_boot() -> Boot:
    """This system's boot, as a history would have it."""
    return Boot(
        0,
        identity.boot_id() or "",
        identity.hostname(),
        identity.release(),
        identity.build_id(),
        kallsyms.text_start(),
        identity.possible_nodes(),
    )


def preferred(boots: list[Boot]) -> Boot | None:
    """This system's boot, else the newest; None if there is none."""
    here = identity.boot_id()
    chosen = [boot for boot in boots if boot.boot_id == here] or boots
    return chosen[-1] if chosen else None


def describe(boot: Boot) -> str:
    """A boot in words: host, kernel and the beginning of its id."""
    return f"{boot.host}, Linux {boot.release}, boot {boot.boot_id[:8]}"


def open_boot(
    path: str, report: Callable[[str], None], origin: Origin | None = None, asked: str | None = None
) -> BootHistory:
    """What a history holds of the boot that data is from: the caller's to close.

    For data it is complete up to now: a recorder at work is waited for. Without an ``origin``
    it is that of this system's boot, or of the newest. ``asked`` is the boot that a user chose.
    ``report`` is called with what a user must know, a sentence each.
    HistoryError if the file cannot be used, holds no such boot, or several that it can be.
    """
    history = History(path)
    try:
        boots = history.boots()
        boot = _asked(boots, asked, path, origin) if asked else _choose(history, boots, origin)
        if len(boots) > 1:
            report(f"{path} holds {len(boots)} boots; this is about {describe(boot)}")
        recorded = history.recorded(boot)
        if origin is not None:
            recorded.wait_covered(time.monotonic_ns())
        for warning in recorded.warnings():
            report(f"{path}: {warning}")
        for sentence in () if origin is None else origin.other_host(boot):
            report(sentence)
    except BaseException:
        history.close()
        raise
    return recorded


def _asked(boots: list[Boot], asked: str, path: str, origin: Origin | None) -> Boot:
    """The boot of that number or id. HistoryError for none, several, or one of another kernel."""
    found = [boot for boot in boots if str(boot.row) == asked]
    found = found or [boot for boot in boots if boot.boot_id.startswith(asked)]
    if len({boot.boot_id for boot in found}) != 1:
        raise HistoryError(
            f"{path} has no boot {asked}, or several that begin so", f"it has: {_listed(boots)}"
        )
    if origin is not None and not origin.is_of_kernel(found[-1]):
        raise HistoryError(
            f"the {origin.data} is from another kernel than boot {asked} in {path}",
            "leave out --boot, or name another history with -H",
        )
    return found[-1]


def _choose(history: History, boots: list[Boot], origin: Origin | None) -> Boot:
    """The boot that data of ``origin`` is from; any of them that its times do not tell apart."""
    fitting = boots if origin is None else _fitting(history, boots, origin)
    if origin is None or origin.times == {}:
        chosen = preferred(fitting)
    elif len({boot.boot_id for boot in fitting}) > 1:
        raise HistoryError(
            f"{history.path} has several boots that this {origin.data} can be from:"
            f" {_listed(fitting)}",
            "choose one with --boot NUMBER",
        )
    else:
        chosen = fitting[-1] if fitting else None
    if chosen is not None:
        return chosen
    if origin is None:
        raise HistoryError(f"{history.path} holds nothing yet", "record into it with: ksym record")
    raise HistoryError(
        f"{history.path} has no record of the kernel this {origin.data} is from",
        "name the history that was recorded beside it with -H",
    )


def _fitting(history: History, boots: list[Boot], origin: Origin) -> list[Boot]:
    """The boots that data can be from, as far as its kernel, its times and its host tell."""
    here = identity.boot_id()
    recorded = [history.recorded(boot) for boot in boots if origin.fits(boot)]
    recorded = [
        known
        for known in recorded
        if (known.boot.boot_id != here and not origin.this_boot_only)
        or (known.boot.boot_id == here and origin.can_be_of_now(known.clock_map()))
    ]
    recorded = list(filter(origin.is_covered, recorded)) or recorded
    fitting = [known.boot for known in recorded]
    return [boot for boot in fitting if boot.host == origin.host] or fitting


def _listed(boots: list[Boot]) -> str:
    listed = [f"{boot.row} ({describe(boot)})" for boot in boots[-_MOST_LISTED:]]
    more = len(boots) - len(listed)
    return ", ".join(listed) + (f", and {more} older" if more else "")
