"""What commands read: the running system, a history, the kernel's file, perf.data, perf's text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from ksym_plugin.cli.output import say
from ksym_plugin.history.reader import BootHistory
from ksym_plugin.kernel import identity, snapshot, vmlinux
from ksym_plugin.kernel.dwarf import ImageLines
from ksym_plugin.kernel.elf import ElfError
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.kernel.vmlinux import Image
from ksym_plugin.perf.data import Recorded, is_piped
from ksym_plugin.perf.repaint import StackReader
from ksym_plugin.perf.script import Input
from ksym_plugin.timeline.errors import HistoryError, KallsymsError, KsymError, SourceError
from ksym_plugin.timeline.symbols import Lifetime
from ksym_plugin.timeline.timeline import Timeline


def lifetimes() -> list[Lifetime]:
    """The BPF symbols that are loaded now. SourceError if the kernel does not list them."""
    taken = snapshot.take()
    if taken.limit:
        say(taken.limit)
    return [Lifetime(load) for load in taken.loads]


def timeline() -> Timeline | None:
    """The same as a timeline; None, with a message, if the kernel does not list them."""
    current = Timeline()
    current.nodes = identity.possible_nodes()
    try:
        for lifetime in lifetimes():
            current.enter(lifetime)
    except SourceError as error:
        say(f"BPF programs have names only as kallsyms lists them: {error}")
        return None
    return current


def kallsyms() -> Kallsyms | None:
    """The static symbols of this kernel; None, with a message, if they cannot be read."""
    try:
        return Kallsyms.load_shown()
    except KallsymsError as error:
        say(f"only BPF symbols have names here: {error}")
        return None


def no_history() -> KsymError:
    return HistoryError(
        "there is no history to look back into", "make one with ksym record, or name one with -H"
    )


def open_data(path: str | None) -> Input:
    """A perf.data. KsymError if there is none, or standard input is something else."""
    if path is None:
        path = "-" if is_piped() else "perf.data"  # As perf chooses (perf-script(1), -i).
        if path != "-" and not os.path.exists(path):
            raise KsymError("there is no perf.data here", "record one, or name it with -i")
    source = Input(path)
    if source.path is None:
        raise KsymError("standard input is no perf.data", "perf's text is for: ksym annotate")
    return source


def read_all(reader: StackReader, pieces: Iterable[bytes]) -> None:
    """Have the whole of perf's text read."""
    for piece in pieces:
        reader.read(piece)
    reader.end()


def open_kernel(
    path: str | None,
    with_lines: bool,
    history: BootHistory | None,
    statics: Kallsyms | None,
    stack: contextlib.ExitStack,
) -> tuple[Image | None, ImageLines | None]:
    """The file of the kernel that runs, or that the history is of; and its lines if wanted.

    ElfError where the file is of another build. debuginfod is asked only if there is no
    file, lines are wanted and $DEBUGINFOD_URLS is set. ``stack`` closes the lines.
    """
    build_id, text_start = identity.build_id(), None if statics is None else statics.text_start
    if history is not None:
        build_id, text_start = history.boot.build_id, history.boot.text_start or text_start
    if path is None:
        if not with_lines:
            return None, None
        if not vmlinux.has_servers():
            raise ElfError(
                "lines of kernel functions need the kernel's debug information",
                f"name its vmlinux with --vmlinux, or servers in ${vmlinux.SERVERS}",
            )
        path = vmlinux.download(build_id or "")
    image = vmlinux.open_image(path, text_start, build_id, statics, say)
    return image, open_lines(image, stack) if with_lines else None


def open_lines(image: Image | None, stack: contextlib.ExitStack) -> ImageLines | None:
    """The source lines of the kernel; None without a file, or, with a message, if it has none."""
    lines = None if image is None else vmlinux.open_lines(image, say)
    if lines is not None:
        stack.callback(lines.close)
    return lines


def vmlinux_for_data(path: str | None, with_lines: bool, recorded: Recorded) -> str | None:
    """The kernel's file of a perf.data: ``path``, or what a debuginfod server has.

    ElfError where ``path`` is not of the kernel that was recorded. Servers are asked
    only if lines are wanted and there are some. If they fail, that is a message, no error.
    """
    if path is not None:
        vmlinux.check_image(path, recorded.build_id)
        return path
    build_id = recorded.build_id
    if not (with_lines and vmlinux.has_servers() and build_id and recorded.text_start):
        return None
    try:
        found = vmlinux.download(build_id)
        vmlinux.check_image(found, build_id)
    except KsymError as error:
        say(f"only BPF frames get source lines: {error}")
        return None
    return found
