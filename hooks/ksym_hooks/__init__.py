"""Kernel frames for any profiler host, through pluggy.

A host asks and listens; plugins answer. This package needs pluggy and nothing else: it
does not import the plugin that comes with it.

>>> with get_plugin_manager() as manager:
...     frames = manager.hook.ksym_resolve_frames(
...         addresses=[0xFFFFFFFF81000000], time=None, clock="monotonic"
...     )
"""

from __future__ import annotations

from ksym_hooks.manager import KsymPluginManager, get_plugin_manager
from ksym_hooks.markers import hookimpl, hookspec
from ksym_hooks.types import Frame, Reason, Source, Symbol, is_frame
from ksym_hooks.warning import PluginWarning

__all__ = [
    "Frame",
    "KsymPluginManager",
    "PluginWarning",
    "Reason",
    "Source",
    "Symbol",
    "get_plugin_manager",
    "hookimpl",
    "hookspec",
    "is_frame",
]
