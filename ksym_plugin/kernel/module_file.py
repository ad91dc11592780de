"""Where a module's ELF file is, and what is in it."""

from __future__ import annotations

import contextlib
import os

from ksym_plugin.kernel.elf import ElfError, ElfFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_ROOT = "/lib/modules"
_ENDING = ".ko"
#: The largest modules have some 10 MB, with debug information a hundred more.
_MOST_BYTES = 1 << 28
_CHUNK = 1 << 20


def path_of(name: str, release: str, root: str = _ROOT) -> str | None:
    """The file that modprobe takes for a module, None if it knows none."""
    folder = os.path.join(root, release)
    try:
        with open(os.path.join(folder, "modules.dep"), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                path = line.partition(":")[0]
                stem = path.rpartition("/")[2].partition(_ENDING)[0]
                if stem.replace("-", "_") == name:
                    return os.path.join(folder, path)
    except OSError:
        return None
    return None


def read(path: str, sections: Mapping[str, int], build_id: str | None) -> ElfFile:
    """A module's functions at its sections' addresses.

    ``build_id`` is that of the loaded module. ElfError if the file is not its, or cannot be
    used; ImportError without pyelftools.
    """
    with _plain(path) as plain:
        file = ElfFile(plain, sections)
    if build_id is None or file.build_id != build_id:
        raise ElfError(f"{path} is not what was loaded")
    return file


@contextlib.contextmanager
def _plain(path: str) -> Iterator[str]:
    """The path of the file as it was before it was compressed."""
    if path.endswith(_ENDING):
        yield path
        return
    fd = os.memfd_create("module", os.MFD_CLOEXEC)
    try:
        try:
            _unpack(path, fd)
        except (OSError, EOFError, ValueError) as error:
            raise ElfError(f"{path} cannot be unpacked ({error})") from None
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _unpack(path: str, fd: int) -> None:
    """Write what a file holds to ``fd``; ValueError for what cannot be unpacked here."""
    if path.endswith(".zst"):
        _run(["zstd", "-dcq", path], fd)
    elif path.endswith(".xz"):
        import lzma

        with lzma.open(path) as packed:
            _copy(packed.read, fd, lzma.LZMAError)
    elif path.endswith(".gz"):
        import gzip
        import zlib

        with gzip.open(path) as zipped:
            _copy(zipped.read, fd, zlib.error)
    else:
        raise ValueError("it is packed in an unknown way")


def _copy(read: Callable[[int], bytes], fd: int, damage: type[Exception]) -> None:
    left = _MOST_BYTES
    while left > 0:
        try:
            data = read(_CHUNK)
        except damage as error:
            raise ValueError(error) from None
        if not data:
            return
        left -= os.write(fd, data)


def _run(command: list[str], fd: int) -> None:
    """What Python before 3.14 cannot unpack: a program may."""
    import subprocess

    try:
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=quiet, stdout=fd, stderr=quiet, check=True)
    except subprocess.CalledProcessError as error:
        raise ValueError(error) from None
