#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Name every kernel frame of a perf.data as it was when it was sampled.

    perf script -s ksym_handler.py -- [-H HISTORY] [--clock CLOCK] [--format FORMAT]
                                      [--lines] [--vmlinux FILE]

Formats are text, folded, svg, speedscope, and report. --lines tells source lines, of the
kernel too if its file is named.

``ksym record`` writes the history. This file only finds the ksym_plugin package and
hands perf's events to it: see ksym_plugin/perf/handler.py. It is also a program, which needs
no perf that has Python: it reads what perf script prints.

    ksym_handler.py -i perf.data [OPTIONS]
    perf script | ksym_handler.py [OPTIONS]
"""

import os
import sys

# perf embeds the system's Python, which knows of no virtual environment, and ``__file__``
# is gone once this body has run.
_HERE = os.path.dirname(os.path.realpath(__file__))
_CANDIDATES = (
    os.environ.get("KSYM_PACKAGE"),  # for a package that lies elsewhere
    os.path.join(_HERE, "..", ".."),  # contrib/perf-script in a checkout
    os.path.join(_HERE, "..", "..", ".."),  # ksym_plugin/_contrib/perf-script in a wheel
)


def _load():
    if sys.version_info < (3, 9):  # noqa: UP036 - an older perf may embed an older Python
        sys.exit("ksym: this perf embeds Python {}.{}; 3.9 is needed".format(*sys.version_info))
    for folder in _CANDIDATES:
        if folder and os.path.isfile(os.path.join(folder, "ksym_plugin", "perf", "handler.py")):
            # In front, so that a checkout's handler never meets another version's package.
            sys.path.insert(0, os.path.abspath(folder))
            break
    try:
        from ksym_plugin.perf import handler
    except ImportError as error:
        sys.exit(f"ksym: {error}; run this through ksym script, or set PYTHONPATH")
    return handler


_handler = _load().start(sys.argv[1:])
process_event = _handler.process_event


def trace_end():
    _handler.trace_end()
    if _handler.is_cut_short:
        # An exception would abort perf, and perf has no other way to be told.
        os._exit(1)


def trace_unhandled(_event_name, _context, _fields, event):
    """Tracepoints; perf hands over ``event`` to a function of four arguments alone."""
    _handler.process_event(event)
