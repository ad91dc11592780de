"""Which history to use, and which boot in it: finding and opening it for a reader."""

from __future__ import annotations

import os
import time

from ksym_plugin.history.reader import History
from ksym_plugin.kernel import identity
from ksym_plugin.timeline.errors import HistoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ksym_plugin.history.reader import Boot, BootHistory

#: Names a history for every command of a shell or a service.
VARIABLE = "KSYM_HISTORY"
#: What ``ksym record`` writes, and what is looked for beside a perf.data.
BESIDE = "ksym.db"
#: What the recorder writes that runs as a service.
SYSTEM = "/var/lib/ksym/history.db"


def find(explicit: str | None, data_path: str | None) -> str | None:
    """The history to use: ``explicit``, $KSYM_HISTORY, ksym.db beside the data, the system's.

    ``data_path`` is the perf.data's; None or ``-`` (a pipe) stands for the working
    directory. What was asked for by name is returned whether or not it is there, so that
    opening it says what is wrong with it. None if there is no history.
    """
    asked = explicit or os.environ.get(VARIABLE)
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
    """What is known of the kernel that data is from; None for what is not.

    ``data`` is the data's name in errors. ``text_start`` is the address of ``_text``, which
    differs from boot to boot with KASLR. ``this_boot_only`` says that the data is of no use
    to any other boot.
    """

    __slots__ = ("build_id", "data", "host", "release", "text_start", "this_boot_only")

    def __init__(
        self,
        data: str,
        build_id: str | None = None,
        release: str | None = None,
        host: str | None = None,
        text_start: int | None = None,
        this_boot_only: bool = False,
    ) -> None:
        self.data = data
        self.build_id = build_id
        self.release = release
        self.host = host
        self.text_start = text_start
        self.this_boot_only = this_boot_only

    def fits(self, boot: Boot) -> bool:
        """Whether nothing that is known of both differs."""
        here = (self.build_id, self.release, self.host, self.text_start)
        there = (boot.build_id, boot.release, boot.host, boot.text_start)
        return all(one is None or other is None or one == other for one, other in zip(here, there))


def choose_boot(boots: list[Boot], origin: Origin | None = None) -> Boot | None:
    """The boot that data of ``origin`` can be from, the newest of several.

    A boot whose kernel or host differ from what is known is never chosen: its names would
    be wrong. The boot of this system is preferred where it fits. None if no boot fits.
    """
    fitting = [boot for boot in boots if origin is None or origin.fits(boot)]
    of_this_system = [boot for boot in fitting if boot.boot_id == identity.boot_id()]
    if origin is not None and origin.this_boot_only:
        fitting = of_this_system
    chosen = of_this_system or fitting
    return chosen[-1] if chosen else None


def describe(boot: Boot) -> str:
    """A boot in words: host, kernel and the beginning of its id."""
    return f"{boot.host}, Linux {boot.release}, boot {boot.boot_id[:8]}"


def open_boot(
    path: str, report: Callable[[str], None], origin: Origin | None = None
) -> BootHistory:
    """What a history holds of the boot that data is from: the caller's to close.

    For data it is complete up to now: a recorder at work is waited for. Without an
    ``origin`` it is that of this system's boot, or of the newest. ``report`` is called with
    what a user must know, a sentence each: which of several boots it is, and what is missing.
    HistoryError if the file cannot be used, or holds no such boot.
    """
    history = History(path)
    try:
        boots = history.boots()
        boot = choose_boot(boots, origin)
        if boot is None:
            raise _no_boot(path, origin)
        if len(boots) > 1:
            report(f"{path} holds {len(boots)} boots; this is about {describe(boot)}")
        recorded = history.recorded(boot)
        if origin is not None:
            recorded.wait_covered(time.monotonic_ns())
        for warning in recorded.warnings():
            report(f"{path}: {warning}")
    except BaseException:
        history.close()
        raise
    return recorded


def _no_boot(path: str, origin: Origin | None) -> HistoryError:
    if origin is None:
        return HistoryError(f"{path} holds nothing yet", "record into it with: ksym record")
    return HistoryError(
        f"{path} has no record of the kernel this {origin.data} is from",
        "name the history that was recorded beside it with -H",
    )
