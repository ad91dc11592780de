"""How the handler starts inside a perf that embeds Python, or as a program of its own."""

from __future__ import annotations

import gc
import os
import signal
import sys

from ksym_plugin.perf import data
from ksym_plugin.perf.handler import Handler, parse
from ksym_plugin.perf.output import say
from ksym_plugin.timeline.errors import KsymError

#: Built into perf's own interpreter and no other.
_PERF_MODULE = "perf_trace_context"


def start(arguments: list[str]) -> Handler:
    """The handler for the perf this runs inside of; exits with a sentence if it cannot be.

    Where there is no perf around it, it is a program: that runs, and exits at its end.
    """
    is_embedded = _PERF_MODULE in sys.builtin_module_names
    options = parse(arguments, is_embedded)
    _prepare()
    try:
        if is_embedded:
            return Handler(options, data.path_of_running_perf())
        from ksym_plugin.perf import program

        sys.exit(program.run(options))
    except KsymError as error:
        say(str(error))
        sys.exit(1)


def _prepare() -> None:
    """Set up the interpreter, which does nothing but handle samples."""
    # Every sample is a tree of dicts without cycles: looking for some costs a twentieth.
    gc.disable()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As perf itself: a closed pipe ends it.
    if sys.stdout is None:  # closed by whoever started perf
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
