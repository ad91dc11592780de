"""The markers of specifications and of implementations."""

from __future__ import annotations

import pluggy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: pluggy's project name, the entry points' group, and the prefix of every hook.
PROJECT: Final = "ksym"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
