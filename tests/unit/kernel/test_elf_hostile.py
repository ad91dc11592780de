"""ELF files made to take more time and memory than they have bytes.

Each has a few hundred kilobytes, of which a reader that believes it makes gigabytes, or
which it reads for minutes: it is read or refused by a process with bounds.
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys

import pytest

from tests.unit.elf_files import NOTYPE, TEXT, Sym, elf, vmlinux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

SECONDS, BYTES = 30, 1 << 30
SIZE = 300_000
READ = """
import sys
from ksym_plugin.kernel.elf import ElfError, ElfFile
try:
    file = ElfFile(sys.argv[1])
    for start in set(file.starts):
        file.find(start)
    file.functions()
except ElfError as error:
    print(error)
else:
    print("read")
"""


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def read(path: Path, content: bytes) -> str:
    """What is said of a file when its functions are asked for."""
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)],
        env={"PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(path.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        preexec_fn=bounded,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def names_within_names() -> bytes:
    count = SIZE // 24
    symbols = [Sym("_text", TEXT, 0, NOTYPE)]
    whole = bytearray(vmlinux(symbols + [Sym("x" * 23, TEXT + 64, 8)] * count))
    # All names in one: what ended them goes, but for the last.
    start = whole.index(b"x" * 23)
    end = whole.rindex(b"x" * 23)
    whole[start:end] = whole[start:end].replace(b"\0", b"x")
    return bytes(whole)


def sections_without_size() -> bytes:
    """The number of sections is the size that the first one claims."""
    whole = bytearray(vmlinux([Sym("_text", TEXT, 0, NOTYPE)]))
    headers = struct.unpack_from("<Q", whole, 40)[0]
    struct.pack_into("<H", whole, 60, 0)
    struct.pack_into("<Q", whole, headers + 32, 1 << 60)
    return bytes(whole)


def sections_with_one_endless_name() -> bytes:
    return elf(
        {"." + "y" * SIZE: b"", **{f".{number}": b"" for number in range(3000)}}, shared=True
    )


def notes_within_notes() -> bytes:
    notes = struct.pack("<III", 0, 0, 1) * (SIZE // 12)
    return elf({".note": notes, **{f".note{number}": b"" for number in range(3000)}}, notes=True)


@pytest.mark.parametrize(
    "make",
    [
        names_within_names,
        sections_without_size,
        sections_with_one_endless_name,
        notes_within_notes,
    ],
)
def test_what_is_endless_is_bounded(make: object, tmp_path: Path) -> None:
    content = make()  # type: ignore[operator]
    assert len(content) < 8 * SIZE
    said = read(tmp_path / "vmlinux", content)
    assert said == "read\n" or "damaged" in said or "compressed" in said
