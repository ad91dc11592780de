"""The kernel's file, read within perf's own interpreter, which mostly lacks pyelftools."""

from __future__ import annotations

import os
import sys

from ksym_plugin.kernel import identity
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf.output import say
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.kernel.elf import Image
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.known import Known
    from ksym_plugin.timeline.packed import Line

#: Where the package ``elftools`` is; set by ``ksym script``, whose Python has it.
VARIABLE: Final = "KSYM_ELFTOOLS"


def opened(path: str, recorded: Recorded, known: Known) -> Image | None:
    """The image of the kernel that a perf.data is of; None, and said why, without pyelftools.

    ElfError if the file is of another kernel, or where that kernel lay is not known.
    """
    problem = _load_elftools()
    if problem:
        say(
            f"{path} is not read, as pyelftools cannot be used ({problem});"
            " run ksym script, or install it for this Python (Debian: python3-pyelftools)"
        )
        return None
    from ksym_plugin.kernel.elf import ElfFile, Image

    build_id, text_start = recorded.build_id, recorded.text_start
    if known.boot is not None:
        build_id = build_id or known.boot.build_id
        text_start = text_start or known.boot.text_start
    if known.is_this_boot:
        build_id = build_id or identity.build_id()
        text_start = text_start or identity.start()
    image = Image(ElfFile.kept(path), text_start, build_id, _kallsyms(known))
    if build_id is None or image.file.build_id is None:
        say(f"without a build id there is no telling whether {path} is of this very kernel")
    return image


def _kallsyms(known: Known) -> Kallsyms | None:
    """The running kernel's own table, if the data is of it."""
    try:
        return Kallsyms.load() if known.is_this_boot else None
    except KsymError as error:
        say(str(error))
        return None


def _load_elftools() -> str:
    """Make pyelftools importable; why that is not possible, or nothing.

    From the folder it is given it loads that package alone: what else lies beside it is
    another Python's.
    """
    folder = os.environ.get(VARIABLE)
    try:
        if folder and "elftools" not in sys.modules:
            from importlib.util import module_from_spec, spec_from_file_location

            place = os.path.join(folder, "__init__.py")
            spec = spec_from_file_location("elftools", place, submodule_search_locations=[folder])
            if spec is None or spec.loader is None:
                return f"{folder} is no package"
            package = sys.modules["elftools"] = module_from_spec(spec)
            spec.loader.exec_module(package)
        import elftools.elf.elffile  # noqa: F401 - whether it can be
    except Exception as error:  # noqa: BLE001 - what is not pyelftools may do anything
        sys.modules.pop("elftools", None)
        return str(error) or type(error).__name__
    return ""


class KernelLines:
    """The lines of an image, each looked up once; none any more once its DWARF misleads.

    Raises ElfError if the file cannot be opened.
    """

    def __init__(self, image: Image) -> None:
        from ksym_plugin.kernel.dwarf import ImageLines

        self._lines: ImageLines | None = ImageLines(image)
        self._found: dict[int, Line | None] = {}

    def line(self, address: int, /) -> Line | None:
        """The line of the instruction at an address in the kernel's memory."""
        if address not in self._found:
            self._found[address] = self._find(address)
        return self._found[address]

    def close(self) -> None:
        """Let go of the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _find(self, address: int) -> Line | None:
        if self._lines is None:
            return None
        try:
            return self._lines.line(address)
        except KsymError as error:
            say(f"no more source lines of the kernel: {error}")
            self.close()
            return None
