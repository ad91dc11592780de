"""The hooks: what a host may ask, what it is notified of, and what others may add.

Arguments go by name. An implementation may leave out arguments it does not need. What one
raises never reaches the host: it is passed over, and named in a ``PluginWarning`` once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksym_hooks.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pluggy import PluginManager

    from ksym_hooks.types import Answer, Clock, Frame, Sources, Symbol


@hookspec(firstresult=True)
def ksym_resolve_frames(
    addresses: Sequence[int], time: int | None, clock: Clock
) -> Sequence[Answer] | None:
    """Names for ``addresses`` as they were at ``time``: one answer for each, in order.

    Host to plugin; a whole callchain, or a batch of the same time, per call, from any
    thread. ``time`` is in ns of ``clock``, as the sample has it; None stands for the newest
    state that is known, without looking whether there is a newer one. The host always gets
    a list of that length. An implementation returns None to leave the batch to the next.

    The first call starts what the plugin needs, and may take a second; a host that runs an
    event loop makes it in a thread.
    """


@hookspec
def ksym_symbols_changed(
    added: Sequence[Symbol], removed: Sequence[Symbol], generation: int
) -> None:
    """Symbols came and went; the host drops what it has cached of them.

    Plugin to host. ``generation`` counts up. A host may keep answers for ``time=None`` by
    (address, generation): it notes the newest generation it was told of, *then* asks, and
    keeps the answer under what it noted. Called on a thread of the plugin's, never two at
    a time, while no lock is held: the host may ask again from here, and should be quick.
    """


@hookspec
def ksym_events_lost(since: int, until: int, count: int | None) -> None:
    """Changes between ``since`` and ``until`` (CLOCK_MONOTONIC ns) may have been lost.

    Plugin to host, like ``ksym_symbols_changed``. Answers of that time are ``gap`` from now
    on; the host drops what it has kept of it. ``count`` is None where nobody knows.
    """


@hookspec
def ksym_sources() -> Sources | None:
    """Further event sources: by name, what to call to start one.

    Third party to plugin. ``KSYM_SOURCE=name`` asks for one of them; otherwise they are
    tried after the built-in ones. Starting one raises ``ksym_plugin.SourceError``
    where it cannot work, having closed all it had opened.
    """


@hookspec(firstresult=True)
def ksym_format_frame(frame: Frame) -> str | None:
    """The text to show for a frame; None leaves it to the next. Without any: the name,
    with a question mark where it is not certain."""


@hookspec
def ksym_start(manager: PluginManager) -> None:
    """A host is there; its hooks are ``manager.hook``. Nothing needs to be opened yet."""


@hookspec
def ksym_stop(manager: PluginManager) -> None:
    """That host is done: nothing that was started for it alone stays, no thread, no file."""
