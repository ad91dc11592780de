"""The kernel's vmlinux: named by the user, or found by debuginfod."""

from __future__ import annotations

import contextlib

import click

from ksym_plugin.cli.output import say
from ksym_plugin.kernel import debuginfod, identity
from ksym_plugin.kernel.dwarf import ImageLines
from ksym_plugin.kernel.elf import ElfError, ElfFile, Image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.history.reader import Past
    from ksym_plugin.kernel.kallsyms import Kallsyms

vmlinux = click.option(
    "--vmlinux", metavar="FILE", help="Name kernel functions from this vmlinux or .debug file."
)
lines = click.option(
    "--lines",
    "with_lines",
    is_flag=True,
    help="Source lines of the kernel too, by DWARF; needs --vmlinux or $DEBUGINFOD_URLS.",
)


def opened(
    path: str | None,
    with_lines: bool,
    known: Past | None,
    statics: Kallsyms | None,
    stack: contextlib.ExitStack,
) -> tuple[Image | None, ImageLines | None]:
    """The image that runs, or ran when the history was recorded; and its lines if wanted.

    ElfError where the file is of another build. debuginfod is asked only if there is no
    file, lines are wanted and $DEBUGINFOD_URLS is set.
    """
    build_id = identity.build_id() if known is None else known.boot.build_id
    text_start = None if statics is None else statics.text_start
    if known is not None and known.boot.text_start is not None:
        text_start = known.boot.text_start
    if path is None:
        if not with_lines:
            return None, None
        if not debuginfod.is_wanted():
            raise ElfError(
                "lines of kernel functions need the kernel's debug information",
                f"name its vmlinux with --vmlinux, or servers in ${debuginfod.VARIABLE}",
            )
        path = debuginfod.find(build_id or "")
    image = Image(ElfFile.kept(path), text_start, build_id, statics)
    if build_id is None or image.file.build_id is None:
        say(f"without a build id there is no telling whether {path} is of this very kernel")
    if not with_lines:
        return image, None
    found = ImageLines(image)
    stack.callback(found.close)
    if not found.exist:
        say(f"{path} has no debug information (DWARF), so no line of the kernel is known")
    return image, found
