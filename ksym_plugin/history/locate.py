"""Which history to use, and which boot in it."""

from __future__ import annotations

import os
import time

from ksym_plugin.timeline.errors import HistoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from ksym_plugin.history.reader import Boot, History, Past

#: Names a history for every command of a shell or a service.
VARIABLE: Final = "KSYM_HISTORY"
#: What ``ksym record`` writes, and what is looked for beside a perf.data.
BESIDE: Final = "ksym.db"
#: What the recorder writes that runs as a service.
SYSTEM: Final = "/var/lib/ksym/history.db"


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
    """A history that may not even be looked for counts: passing over it would go unsaid."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def choose_boot(
    history: History,
    boot_id: str | None = None,
    build_id: str | None = None,
    release: str | None = None,
    host: str | None = None,
    text_start: int | None = None,
) -> Boot | None:
    """The boot that data of such a kernel and host can come from, the newest of several.

    What is None is not known. A boot whose kernel or host differ from what is known is
    never chosen: its names would be wrong. ``text_start`` is the address of ``_text``,
    which differs from boot to boot with KASLR. ``boot_id`` is a preference only: the boot of
    this system if it fits, else another. None if no boot fits.
    """
    wanted = (build_id, release, host, text_start)
    fitting = [
        boot
        for boot in history.boots()
        if all(
            want is None or has is None or want == has
            for want, has in zip(wanted, (boot.build_id, boot.release, boot.host, boot.text_start))
        )
    ]
    of_this_system = [boot for boot in fitting if boot.boot_id == boot_id]
    chosen = of_this_system or fitting
    return chosen[-1] if chosen else None


def describe(boot: Boot) -> str:
    """A boot in words: host, kernel and the beginning of its id."""
    return f"{boot.host}, Linux {boot.release}, boot {boot.boot_id[:8]}"


def choice_notice(history: History, chosen: Boot) -> str:
    """One sentence on which boot was taken, empty where the file holds no other."""
    number = len(history.boots())
    if number < 2:
        return ""
    return f"{history.path} holds {number} boots; this is about {describe(chosen)}"


def record_of(history: History, boot: Boot | None, data: str, tell: Callable[[str], None]) -> Past:
    """The record of the boot that ``data`` was found to be from, up to now.

    ``tell`` is given what a user must know of it, a sentence each. HistoryError for no boot.
    """
    if boot is None:
        raise HistoryError(
            f"{history.path} has no record of the kernel this {data} is from",
            "name the history that was recorded beside it with -H",
        )
    notice = choice_notice(history, boot)
    if notice:
        tell(notice)
    past = history.past(boot)
    past.wait_covered(time.monotonic_ns())
    for warning in past.warnings():
        tell(f"{history.path}: {warning}")
    return past
