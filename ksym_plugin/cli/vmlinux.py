"""The kernel's file for the handler: found and checked before perf starts."""

from __future__ import annotations

import os

from ksym_plugin.cli.output import say
from ksym_plugin.kernel import debuginfod
from ksym_plugin.kernel.elf import ElfFile, Image
from ksym_plugin.perf import data
from ksym_plugin.perf.session import VARIABLE
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.perf.data import Recorded


def chosen(path: str | None, with_lines: bool, data_path: str | None) -> str | None:
    """The file to name to the handler: ``path``, or what a debuginfod server has.

    ElfError where ``path`` cannot be of the kernel that the data tells of. Servers are asked
    only if lines are wanted and there are some; that they do not help is said, no error.
    """
    recorded = data.read(data_path or "perf.data")
    if path is not None:
        _check(path, recorded)
        return path
    build_id = recorded.build_id
    if not (with_lines and debuginfod.is_wanted() and build_id and recorded.text_start):
        return None
    try:
        found = debuginfod.find(build_id)
        _check(found, recorded)
    except KsymError as error:
        say(f"only BPF frames get source lines: {error}")
        return None
    return found


def environment() -> dict[str, str]:
    """What tells the handler, in another Python, where pyelftools is."""
    import elftools

    return {VARIABLE: os.path.dirname(os.path.abspath(elftools.__file__))}


def _check(path: str, recorded: Recorded) -> None:
    file = ElfFile.kept(path)
    # Where the data does not tell where the kernel lay, the history or the running one may.
    start = file.anchor if recorded.text_start is None else recorded.text_start
    Image(file, start, recorded.build_id)
