"""The host's side: finds the plugins, keeps them from doing harm, starts and stops them."""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING

import pluggy

from ksym_hooks import defaults, specs
from ksym_hooks.guard import RAISED, describe, in_time, protect
from ksym_hooks.markers import PROJECT
from ksym_hooks.warning import Complaints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint
    from types import TracebackType

#: Names of plugins not to load, with commas between them; ``*`` for all.
DISABLE = "KSYM_DISABLE_PLUGINS"
#: The plugin of this distribution: its entry point's name, and where it is. It is there
#: also in a checkout that is not installed.
BUILT_IN = "ksym"
_BUILT_IN_MODULE = "ksym_plugin.plugin"


class KsymPluginManager(pluggy.PluginManager):
    """pluggy's manager, for a host: ``manager.hook`` asks, ``register`` makes it listen.

    A context manager: leaving it stops what the plugins run for this host. Entered again
    it starts again. All of it may be used from any thread.
    """

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.complaints = Complaints()
        self._running = False
        self._state = threading.Lock()
        self.add_hookspecs(specs)
        self.register(defaults, defaults.NAME)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """As pluggy's; what the plugin raises later never reaches the host.

        A plugin that cannot be registered is the caller's error and raises as in pluggy.
        """
        try:
            registered = super().register(plugin, name)
        except pluggy.PluginValidationError:
            if self.is_registered(plugin):
                # pluggy before 1.7 keeps what it has just refused.
                self.unregister(plugin)
            raise
        if registered is None:
            return None
        for caller in self.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is not plugin:
                    continue
                if impl.hookwrapper or getattr(impl, "wrapper", False):
                    # It would run around all others, and its errors reach the host.
                    self.unregister(plugin)
                    raise pluggy.PluginValidationError(plugin, f"{caller.name}: no wrappers here")
                is_ours = plugin is defaults or getattr(plugin, "__name__", "") == _BUILT_IN_MODULE
                protect(impl, caller.name, registered, self.complaints, is_ours)
        return registered

    def start(self) -> None:
        """Tell the plugins that there is a host; they open nothing yet. Idempotent."""
        with self._state:
            if self._running:
                return
            self._running = True
        self.hook.ksym_start(manager=self)

    def close(self) -> None:
        """Stop what the plugins run for this host; idempotent."""
        with self._state:
            if not self._running:
                return
            self._running = False
        self.hook.ksym_stop(manager=self)

    def __enter__(self) -> KsymPluginManager:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def get_plugin_manager() -> KsymPluginManager:
    """A manager with the plugins of the entry point group ``ksym``, started.

    A plugin that cannot be loaded, or takes more than a second for it, is named in a
    ``PluginWarning`` and left out. ``KSYM_DISABLE_PLUGINS`` names some, with commas between
    them, or with ``*`` all that are not even to be looked for.
    """
    manager = KsymPluginManager()
    disabled = {name.strip() for name in os.environ.get(DISABLE, "").split(",")}
    if "*" not in disabled:
        # The built-in one first: pluggy asks those that came later before it.
        if BUILT_IN not in disabled:
            _load_built_in(manager)
        for point in _entry_points():
            if point.name not in disabled and not manager.has_plugin(point.name):
                _load(manager, point)
    manager.start()
    return manager


def _entry_points() -> Iterator[EntryPoint]:
    # By distribution: how entry_points() is asked for a group differs between Pythons.
    from importlib.metadata import distributions

    for distribution in distributions():
        for point in distribution.entry_points:
            if point.group == PROJECT:
                yield point


def _load(manager: KsymPluginManager, point: EntryPoint) -> None:
    plugin = in_time(point.load, point.name, "loading it", manager.complaints)
    if plugin is None:
        return
    try:
        manager.register(plugin, point.name)
    except RAISED as error:
        manager.complaints.about(
            point.name, f"it cannot be registered ({describe(error)}); it is left out"
        )


def _load_built_in(manager: KsymPluginManager) -> None:
    try:
        plugin = importlib.import_module(_BUILT_IN_MODULE)
    except ImportError as error:
        # The hooks alone are no mistake: a host gets the default answers.
        if error.name not in (_BUILT_IN_MODULE, _BUILT_IN_MODULE.partition(".")[0]):
            manager.complaints.about(BUILT_IN, f"it cannot be imported ({describe(error)})")
        return
    manager.register(plugin, BUILT_IN)
