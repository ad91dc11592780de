"""What is known of the past, and of now: a history, or the live system."""

from __future__ import annotations

import contextlib
import time

from ksym_plugin.cli.output import say
from ksym_plugin.history import locate
from ksym_plugin.history.reader import History
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import PERF, ClockMap, Instant, PerfClock
from ksym_plugin.timeline.errors import HistoryError, KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ksym_plugin.history.reader import Past


@contextlib.contextmanager
def past(explicit: str | None) -> Iterator[Past | None]:
    """What the history holds of one boot, this system's if it can be; None without any.

    Says which boot that is where there are several, and what the history lacks.
    """
    path = locate.find(explicit, None)
    if path is None:
        yield None
        return
    with History(path) as history:
        boot = locate.choose_boot(history, identity.boot_id())
        if boot is None:
            raise HistoryError(f"{path} holds nothing yet", "record into it with: ksym record")
        notice = locate.choice_notice(history, boot)
        if notice:
            say(notice)
        known = history.past(boot)
        for warning in known.warnings():
            say(f"{path}: {warning}")
        yield known


def is_of_this_boot(known: Past) -> bool:
    return known.boot.boot_id == identity.boot_id()


def moment(known: Past, at: int | None, clock: str | None) -> int:
    """The time asked for in CLOCK_MONOTONIC ns: by default the end of what is covered."""
    if at is not None:
        return known.clock_map().to_monotonic(clock or PERF, at)
    if any(session.writing and not session.closed for session in known.sessions):
        known.wait_covered(time.monotonic_ns())
    return max((session.covered for session in known.sessions), default=0)


def clocks_now() -> ClockMap:
    """The clocks of this system as they are now."""
    return ClockMap([instant_now()])


def instant_now() -> Instant:
    clock = PerfClock()
    try:
        return clock.read()
    finally:
        clock.close()


def no_history() -> KsymError:
    return HistoryError(
        "there is no history to look back into", "make one with ksym record, or name one with -H"
    )
