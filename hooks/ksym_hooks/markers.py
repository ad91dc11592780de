"""The markers of specifications and of implementations."""

from __future__ import annotations

import pluggy

#: pluggy's project name, the entry points' group, and the prefix of every hook.
PROJECT = "ksym"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
