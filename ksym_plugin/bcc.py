"""Kernel names for programs that use bcc: ``install`` replaces bcc's own table by the plugin.

bcc reads /proc/kallsyms once in a process and has no symbol's end: a program loaded later is
named after whatever lies below it. From ``install`` on, ``BPF.ksym``, ``BPF.ksymname``, and
``BPF.sym`` for kernel addresses, answer as of when they are called; what has no name is
``[unknown]``. bcc passes no time: an address that several BPF symbols have had since ``install``,
or may have had, gets the last one's name with a question mark.

    python3 -m ksym_plugin.bcc /usr/sbin/profile-bpfcc -K 5

runs one of bcc's tools that way, unmodified. bcc is iovisor's, as distributions package it.
"""

from __future__ import annotations

import runpy
import sys
import time

import ksym_hooks
from ksym_plugin import plugin
from ksym_plugin.sources import bcc_loader
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import Frame

#: The process id under which bcc keeps the kernel's symbols, among those of processes.
_KERNEL = -1
#: How long ``install`` waits for the plugin to follow the kernel, in seconds.
_PATIENCE = 15.0

_installed: KernelSymbols | None = None


class KernelSymbols:
    """Stands in for bcc's SymbolCache, and answers as that does."""

    def __init__(self, manager: ksym_hooks.KsymPluginManager) -> None:
        self.manager = manager
        self._since = time.monotonic_ns()

    def resolve(self, address: int, _demangle: bool) -> tuple[bytes | None, int, bytes | None]:
        """Name, offset and module of an address; (None, address, None) without a name."""
        hook = self.manager.hook
        (answer,) = hook.ksym_resolve_frames(addresses=[address], time=None, clock="monotonic")
        if not ksym_hooks.is_frame(answer):
            return None, address, None
        follower = plugin.begin()
        if isinstance(answer, Frame) and follower is not None:
            answer = follower.table.for_all_since(answer, self._since)
        name: str = hook.ksym_format_frame(frame=answer)
        module = (answer.module or "").strip("[]").encode() or b"kernel"
        return name.encode(), answer.offset, module

    def resolve_name(self, _module: object, name: str | bytes) -> int:
        """The address of a name, or -1."""
        follower = plugin.begin()
        text = name.decode(errors="replace") if isinstance(name, bytes) else name
        start = follower.start_of(text) if follower is not None else None
        return -1 if start is None else start


def install() -> None:
    """Answer for bcc from here on; idempotent. SourceError if bcc is not there.

    The plugin follows the kernel from now on, in this process, until ``uninstall`` or the
    process's end. It waits until the plugin does, for some seconds at most.
    """
    global _installed
    caches = bcc_loader.load().BPF._sym_caches
    if _installed is not None:
        return
    manager = ksym_hooks.get_plugin_manager()
    try:
        follower = plugin.begin()
    except (OSError, RuntimeError) as error:  # No more descriptors, or threads.
        manager.close()
        raise SourceError(f"the plugin cannot follow the kernel: {error}") from error
    if follower is not None:
        # Of what was there before it knows nothing: every name from then on would be doubtful.
        follower.wait_started(_PATIENCE)
    manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
    _installed = KernelSymbols(manager)
    caches[_KERNEL] = _installed


def uninstall() -> None:
    """Leave bcc to itself again; idempotent."""
    global _installed
    if _installed is None:
        return
    bcc_loader.load().BPF._sym_caches.pop(_KERNEL, None)
    _installed.manager.close()
    _installed = None


def main() -> None:
    """Run the tool that the command line names, as if it had been run itself."""
    if len(sys.argv) < 2:
        sys.exit("usage: python3 -m ksym_plugin.bcc TOOL [ARGUMENT ...]")
    del sys.argv[0]
    try:
        install()
    except SourceError as error:
        sys.exit(f"ksym: {error}")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
