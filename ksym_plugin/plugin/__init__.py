"""The plugin: answers hosts' hooks, from one table of the kernel's symbols in each process.

All hosts in a process share the table, its thread and its source. It is opened by the
first question and closed when the last host has stopped, or when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

from ksym_hooks import PluginWarning, hookimpl
from ksym_plugin.plugin.follower import Follower
from ksym_plugin.sources import AUTO, NAMES, open_source
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import Loss, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ksym_hooks import KsymPluginManager
    from ksym_plugin.plugin.table import Notice
    from ksym_plugin.timeline.symbols import Frame
    from ksym_plugin.timeline.tracker import Source

#: The environment variable that names the source to use, also a third party's.
SOURCE = "KSYM_SOURCE"
_STOPPED = Reason("the plugin has been stopped")

_state = threading.RLock()
_hosts: weakref.WeakSet[KsymPluginManager] = weakref.WeakSet()
_follower: Follower | None = None


@hookimpl
def ksym_start(manager: KsymPluginManager) -> None:
    """Remember the host; nothing is opened before it asks."""
    with _state:
        _hosts.add(manager)


@hookimpl
def ksym_stop(manager: KsymPluginManager) -> None:
    """Forget the host, and close everything with the last one."""
    with _state:
        _hosts.discard(manager)
    _stop_if_unused()


@hookimpl
def ksym_resolve_frames(
    addresses: Sequence[int], time: int | None, clock: str
) -> list[Frame | Reason]:
    """See the specification. An address of user space gets ``USER_ADDRESS`` for a reason."""
    follower = _follower or begin()
    if follower is None:
        return [_STOPPED] * len(addresses)
    return follower.frames(addresses, time, clock)


def begin() -> Follower | None:
    """The follower, started if there is none yet; None if there is no host."""
    global _follower
    with _state:
        if _follower is None and _hosts:
            _follower = Follower(os.environ.get(SOURCE, AUTO), _open, _notify, _warn)
        return _follower


def _stop_if_unused() -> None:
    global _follower
    with _state:
        if _hosts or _follower is None:
            return
        follower, _follower = _follower, None
    follower.stop()


def _open() -> Source:
    """What $KSYM_SOURCE names; without it the best built-in source, then third parties'."""
    wanted = os.environ.get(SOURCE, AUTO)
    others = _third_party_sources()
    if wanted in others and wanted not in NAMES:
        return others[wanted]()
    try:
        return open_source(wanted)[0]
    except SourceError as error:
        if wanted != AUTO or not others:
            raise
        problems = [str(error)]
    for name, construct in others.items():
        try:
            return construct()
        except Exception as error:  # noqa: BLE001 - theirs
            problems.append(f"{name}: {error}")
    raise SourceError("; ".join(problems))


def _third_party_sources() -> dict[str, Callable[[], Source]]:
    offers = (sources for host in _listening() for sources in host.hook.ksym_sources())
    return {name: construct for sources in offers for name, construct in sources.items()}


def _listening() -> list[KsymPluginManager]:
    with _state:
        return list(_hosts)


def _notify(news: Notice) -> None:
    for host in _listening():
        # A warning about a listener must not become an error of the source, where warnings
        # are errors.
        with contextlib.suppress(PluginWarning):
            if isinstance(news, Loss):
                host.hook.ksym_events_lost(since=news.since, until=news.until, count=news.count)
            else:
                host.hook.ksym_symbols_changed(**news._asdict())


def _warn(text: str) -> None:
    # Where warnings are errors, nothing on this thread would catch one.
    with contextlib.suppress(PluginWarning):
        warnings.warn(f"ksym: {text}", PluginWarning, stacklevel=2)


def _before_fork() -> None:
    _state.acquire()
    if _follower is not None:
        _follower.table.lock.acquire()


def _after_fork() -> None:
    if _follower is not None:
        _follower.table.lock.release()
    _state.release()


def _after_fork_in_child() -> None:
    if _follower is not None:
        _follower.after_fork_in_child()
    _after_fork()


def _at_exit() -> None:
    with _state:
        _hosts.clear()
    _stop_if_unused()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork,
    after_in_child=_after_fork_in_child,
)
atexit.register(_at_exit)
