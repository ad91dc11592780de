"""A vmlinux, or its .debug file, at the addresses where a kernel runs: names and lines.

Where $DEBUGINFOD_URLS names servers, it can be had from them.
"""

from __future__ import annotations

import contextlib
import os

from ksym_plugin.kernel import cache
from ksym_plugin.kernel.elf import TOP, ElfError, ElfFile, has_dwarf
from ksym_plugin.kernel.kallsyms import ANCHORS
from ksym_plugin.timeline.symbols import KERNEL, UNKNOWN_ADDRESS, Symbol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.timeline.symbols import Reason

SERVERS = "DEBUGINFOD_URLS"
_WAIT = 90.0
_HEX = frozenset("0123456789abcdef")


class Image:
    """A vmlinux at the address where a kernel runs; answers as Kallsyms does.

    ``text_start`` is where that kernel has ``_text``, or ``_stext`` if that alone is in its
    kallsyms. ``behind`` is the kernel's own table, or None: it names what the file does not,
    and is preferred for labels within functions and for functions without a size. ElfError
    where the file is not of ``build_id`` (None if that is not known), or where it lay is not
    known.
    """

    def __init__(
        self,
        file: ElfFile,
        text_start: int | None,
        build_id: str | None,
        behind: Kallsyms | None = None,
    ) -> None:
        _check_build_id(file, build_id)
        offset = None if text_start is None else _offset(file, text_start, behind)
        if offset is None:
            raise ElfError(
                f"where the code of {file.path} is in the kernel's memory is not known",
                "read /proc/kallsyms as root, or use a history that was recorded as root",
            )
        self.file = file
        self.offset = offset
        self._behind = behind

    def is_kernel(self, address: int) -> bool:
        """Whether the address is in kernel space, as the kernel's own table has it."""
        return self._behind is not None and self._behind.is_kernel(address)

    def find(self, address: int) -> Symbol | Reason:
        """The function that holds the address, or why there is none."""
        linked = address - self.offset
        # Not taken round the end of the address space: that would be no place in the file.
        found = self.file.find(linked) if 0 <= linked <= TOP else None
        other = UNKNOWN_ADDRESS if self._behind is None else self._behind.find(address)
        if found is None:
            return other
        start, end, name = found
        if isinstance(other, Symbol) and (
            other.start > start + self.offset or self.file.is_open(start)
        ):
            return other
        return Symbol(start + self.offset, end + self.offset, name, KERNEL, None)


def _check_build_id(file: ElfFile, build_id: str | None) -> None:
    if build_id is not None and file.build_id is not None and build_id != file.build_id:
        raise ElfError(
            f"{file.path} is of another kernel (build id {file.build_id}, not {build_id})",
            "name the vmlinux or .debug file of that very build",
        )


def _offset(file: ElfFile, text_start: int, behind: Kallsyms | None) -> int | None:
    """How far a kernel was moved: the distance of one symbol. None where that is not sure."""
    linked = file.anchors
    if behind is not None and behind.text_start == text_start:
        offsets = {at - linked[name] for name, at in behind.anchors.items() if name in linked}
    else:
        # It is not told which symbol is there. Where they differ, as on arm64, that is not
        # guessed: KASLR moves a kernel there by less than their distance, too.
        offsets = {text_start - at for at in linked.values() if ANCHORS[0] in linked}
    return offsets.pop() if len(offsets) == 1 and min(offsets) >= 0 else None


def open_image(
    path: str,
    text_start: int | None,
    build_id: str | None,
    behind: Kallsyms | None,
    tell: Callable[[str], None],
) -> Image:
    """The image in a file (see Image). ``tell`` is given a sentence if it may be another's."""
    image = Image(ElfFile.cached(path), text_start, build_id, behind)
    if build_id is None or image.file.build_id is None:
        tell(f"without a build id there is no telling whether {path} is of this very kernel")
    return image


def check_image(path: str, build_id: str | None) -> None:
    """ElfError where a file cannot be that of a kernel; one whose build is not known fits."""
    _check_build_id(ElfFile.cached(path), build_id)


def open_lines(
    image: Image, tell: Callable[[str], None], may_raise: bool = True
) -> ImageLines | None:
    """The source lines of an image, to be closed in the end; None where there are none.

    ``tell`` is given a sentence that says why. ElfError where the file cannot be read; if it
    may not raise, now or later, ``tell`` is given that too (see ImageLines).
    """
    from ksym_plugin.kernel.dwarf import ImageLines

    path = image.file.path
    try:
        if has_dwarf(path):
            return ImageLines(path, image.offset, None if may_raise else tell)
        tell(f"{path} has no debug information (DWARF), so no line of the kernel is known")
    except ElfError as error:
        if may_raise:
            raise
        tell(f"no source lines of the kernel: {error}")
    return None


def has_servers() -> bool:
    """Whether there are debuginfod servers to ask."""
    return bool(os.environ.get(SERVERS, "").split())


def download(build_id: str) -> str:
    """The path of a file with the symbols and DWARF of that build; ElfError if nobody has it.

    It is stored under $XDG_CACHE_HOME. The protocol is that of debuginfod(8).
    """
    if not build_id or not _HEX.issuperset(build_id):
        raise ElfError("this kernel has no build id", "name its vmlinux with --vmlinux")
    target = os.path.join(cache.root(), "debuginfo", build_id)
    if os.path.exists(target):
        return target
    problems = []
    for url in os.environ.get(SERVERS, "").split():
        problem = _download(f"{url.rstrip('/')}/buildid/{build_id}/debuginfo", target)
        if not problem:
            return target
        problems.append(f"{url}: {problem}")
    raise ElfError(
        f"no debuginfod server has build {build_id} ({'; '.join(problems)})",
        "name the kernel's vmlinux or .debug file with --vmlinux",
    )


def _download(url: str, target: str) -> str:
    """Download to ``target``, whole or not at all; why not, or ``""``."""
    import shutil
    import tempfile
    from http.client import HTTPException
    from urllib.request import urlopen

    if not url.startswith(("http://", "https://")):
        return "no http or https address"
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=os.path.dirname(target))
    except OSError as error:
        return f"the file cannot be kept ({error})"
    try:
        # S310 is about other schemes, such as file:, which were turned away above; urllib
        # follows no redirection to one.
        with os.fdopen(fd, "wb") as file, urlopen(url, timeout=_WAIT) as answer:  # noqa: S310
            shutil.copyfileobj(answer, file)
            if answer.length:
                raise OSError(f"{answer.length} bytes are missing")
        os.rename(partial, target)
        return ""
    except (OSError, HTTPException, ValueError) as error:
        # A ValueError is what a malformed address gives.
        return str(error)
    finally:
        # Also on Ctrl-C: a kernel's has hundreds of megabytes.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
