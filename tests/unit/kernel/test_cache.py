"""What is kept of a file: found again while the file is the same, and never trusted."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel import cache as cache_module
from ksym_plugin.kernel import elf
from ksym_plugin.kernel.elf import ElfError, ElfFile
from tests.unit.elf_files import NOTYPE, TEXT, Sym, vmlinux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OF = (1, 2, 3, 4, 5)
PARTS = [b"one", b"", b"three" * 100]
SYMBOLS = [
    Sym("_text", TEXT, 0, NOTYPE),
    Sym("entry", TEXT + 0x100, 0, NOTYPE),
    Sym("do_work", TEXT + 0x1000, 0x20),
    Sym("do_more", TEXT + 0x1020, 0x40),
    Sym("__do_more", TEXT + 0x1020, 0x40),
    Sym("_do_more", TEXT + 0x1020, 0x40),
]
ADDRESSES = [TEXT, TEXT + 0x105, TEXT + 0x1010, TEXT + 0x1030, TEXT + 0x2000, TEXT - 1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "SETTLED_NS", 0)
    return tmp_path / "cache" / "ksym-plugin" / "elf"


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "vmlinux"
    path.write_bytes(vmlinux(SYMBOLS))
    return str(path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read as ELF."""
    found: list[str] = []
    open_elf = elf.open_elf

    def counted(path: str) -> object:
        found.append(path)
        return open_elf(path)

    monkeypatch.setattr(elf, "open_elf", counted)
    return found


def answers(file: ElfFile) -> list[object]:
    found: list[object] = [file.build_id, file.anchors, len(file), file.is_open(TEXT + 0x100)]
    found += [file.starts.tolist(), file.functions()]
    return found + [file.find(address) for address in ADDRESSES]


def test_what_was_stored_is_loaded() -> None:
    assert cache_module.load(OF, 3) is None
    cache_module.store(OF, PARTS)
    assert cache_module.load(OF, 3) == PARTS
    assert cache_module.load(OF, 2) is None
    assert cache_module.load((*OF[:4], 6), 3) is None


def test_nobody_else_may_read_it(cache: Path) -> None:
    cache_module.store(OF, PARTS)
    (entry,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_a_file_is_read_once_until_it_changes(image: str, reads: list[str], tmp_path: Path) -> None:
    first = ElfFile.cached(image)
    again = ElfFile.cached(image)
    assert reads == [image]
    names = [name for start, _, name in first.functions() if start == TEXT + 0x1020]
    assert names == ["do_more", "_do_more", "__do_more"]
    assert answers(again) == answers(first) == answers(ElfFile(image))
    (tmp_path / "new").write_bytes(vmlinux([*SYMBOLS, Sym("late", TEXT + 0x2000, 8)]))
    os.rename(tmp_path / "new", image)
    changed = ElfFile.cached(image)
    assert changed.find(TEXT + 0x2000) == (TEXT + 0x2000, TEXT + 0x2008, "late")
    assert reads == [image] * 3


def test_a_file_that_was_just_written_is_not_kept(
    image: str, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "SETTLED_NS", 1 << 62)
    for _ in range(2):
        assert ElfFile.cached(image).find(TEXT + 0x1000) is not None
    assert reads == [image] * 2


def test_a_file_that_is_not_there_is_said_not_kept(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ElfError, match="cannot be read"):
        ElfFile.cached(str(tmp_path / "absent"))
    assert not cache.exists()


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_entry_is_none_and_written_anew(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    image = str(folder / "vmlinux")
    if not folder.exists():
        folder.mkdir()
        (folder / "vmlinux").write_bytes(vmlinux(SYMBOLS))
    wanted = answers(ElfFile.cached(image))
    entry = entry_of(image)
    whole = entry_bytes(entry)
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    with open(entry, "wb") as file:
        file.write(damaged)
    assert answers(ElfFile.cached(image)) == wanted
    assert entry_bytes(entry) == whole


def entry_of(image: str) -> str:
    of = cache_module.identity(image)
    return os.path.join(cache_module.folder(), f"{of[0]:x}-{of[1]:x}.kept")


def entry_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def packed(words: list[int], width: int) -> bytes:
    return b"".join((word % (1 << 8 * width)).to_bytes(width, sys.byteorder) for word in words)


@settings(max_examples=200)
@given(data=st.data())
def test_a_forged_entry_gives_no_wrong_lengths(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its checksum is right, and what it holds is anything."""
    folder = tmp_path_factory.getbasetemp() / "forged"
    image = folder / "vmlinux"
    if not folder.exists():
        folder.mkdir()
        image.write_bytes(vmlinux(SYMBOLS))
    number = st.integers(0, 40).map(lambda at: TEXT + at)
    starts = data.draw(st.lists(number, max_size=4, unique=True).map(sorted) | st.lists(number))
    ends = [start + data.draw(st.integers(-1, 9)) for start in starts]
    names = [data.draw(st.integers(0, 7)) for _ in starts]
    words = [starts, ends, names, [TEXT, TEXT + data.draw(st.integers(-2, 90))]]
    words[data.draw(st.integers(0, 3))] += data.draw(st.sampled_from([[], [], [], [5]]))
    parts = [data.draw(st.binary(max_size=9)) for _ in range(2)]
    parts += [packed(row, width) for row, width in zip(words, (8, 8, 4, 8))]
    parts.append(data.draw(st.sampled_from([b"ab\0cd\0\xff\0", b"ab\0cd\0\0\0", b"abcdefgh", b""])))
    parts[data.draw(st.integers(2, 5))] += data.draw(st.sampled_from([b"", b"", b"", b"x"]))
    cache_module.store(cache_module.identity(str(image)), parts)
    file = ElfFile.cached(str(image))
    for address in [*ADDRESSES, *range(TEXT, TEXT + 50), 0, (1 << 64) - 1]:
        found = file.find(address)
        assert found is None or found[0] <= address < found[1]
        event("named" if found and found[2] in ("ab", "cd", "b", "d") else "other")
    assert all(length > 0 and isinstance(name, str) for _, length, name in file.functions())


@pytest.fixture
def no_room(cache: Path) -> Iterator[None]:
    """The cache's folder cannot be made: a file is there. (root may write anywhere.)"""
    cache.parent.parent.mkdir()
    cache.parent.write_bytes(b"")
    yield
    assert cache.parent.read_bytes() == b""


@pytest.mark.usefixtures("no_room")
def test_where_nothing_can_be_kept_all_works(image: str, reads: list[str]) -> None:
    for _ in range(2):
        assert ElfFile.cached(image).find(TEXT + 0x1010) is not None
    assert len(reads) == 2


def test_a_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")

    def full(fd: int, mode: str) -> object:
        os.close(fd)
        return open("/dev/full", mode)

    monkeypatch.setattr(os, "fdopen", full)
    cache_module.store(OF, PARTS)
    assert list(cache.iterdir()) == []


def test_another_user_s_entry_is_none(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache_module.store(OF, PARTS)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache_module.load(OF, 3) is None
    cache_module.store(OF, PARTS)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("kind", ["fifo", "folder", "endless"])
def test_what_is_no_file_is_no_entry(kind: str, image: str, cache: Path, reads: list[str]) -> None:
    ElfFile.cached(image)
    entry = next(path for path in cache.iterdir() if path.name.endswith(".kept"))
    entry.unlink()
    if kind == "fifo":
        os.mkfifo(entry)
    elif kind == "folder":
        entry.mkdir()
    else:
        entry.symlink_to("/dev/zero")
    assert ElfFile.cached(image).find(TEXT + 0x1010) is not None
    assert len(reads) == 2


@pytest.mark.parametrize("value", ["", "here", "./here"])
def test_a_folder_that_is_not_absolute_is_ignored(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    cache_module.store(OF, PARTS)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert cache_module.load(OF, 3) == PARTS


def test_a_link_is_no_folder_of_one_s_own(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    cache_module.store(OF, PARTS)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_is_oldest_goes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MOST_ENTRIES", 3)
    cache.mkdir(parents=True)
    (cache / "theirs").write_bytes(b"")
    os.utime(cache / "theirs", (0, 0))
    for number in range(5):
        cache_module.store((number, *OF[1:]), PARTS)
        os.utime(cache / f"{number:x}-2.kept", (number, number))
    assert {entry.name for entry in cache.iterdir()} == {f"{n}-2.kept" for n in (2, 3, 4)} | {
        "theirs"
    }
    monkeypatch.setattr(cache_module, "MOST_BYTES", 2500)
    cache_module.store(OF, [bytes(1000)])
    assert {entry.name for entry in cache.iterdir()} == {
        "1-2.kept",
        "4-2.kept",
        "3-2.kept",
        "theirs",
    }
    larger = (9, *OF[1:])
    cache_module.store(larger, [bytes(1500)])
    assert cache_module.load(larger, 1) is None


def test_writers_at_once_leave_one_whole_entry(cache: Path) -> None:
    contents = [[bytes([number]) * 100_000] for number in range(8)]
    start = threading.Barrier(len(contents))

    def write(parts: list[bytes]) -> None:
        start.wait()
        for _ in range(10):
            cache_module.store(OF, parts)
            assert cache_module.load(OF, 1) in contents

    threads = [threading.Thread(target=write, args=[parts]) for parts in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache_module.load(OF, 1) in contents
    assert len(list(cache.iterdir())) == 1


def test_an_entry_of_another_file_is_none(image: str, tmp_path: Path, reads: list[str]) -> None:
    """Also if somebody puts it where this file's is."""
    other = tmp_path / "other"
    other.write_bytes(vmlinux([Sym("_text", TEXT, 0, NOTYPE), Sym("wrong", TEXT + 0x1000, 0x20)]))
    ElfFile.cached(str(other))
    shutil.copy(entry_of(str(other)), entry_of(image))
    found = ElfFile.cached(image).find(TEXT + 0x1000)
    assert found is not None
    assert found[2] == "do_work"
    assert reads == [str(other), image]
