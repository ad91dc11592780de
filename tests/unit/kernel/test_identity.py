"""The kernel's build id and its companions, against notes built by hand and the tools."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.kernel import identity

ID = bytes(range(0xE0, 0xF4))


def note(kind: int, name: bytes, description: bytes) -> bytes:
    def padded(part: bytes) -> bytes:
        return part + b"\0" * (-len(part) % 4)

    head = struct.pack("=III", len(name), len(description), kind)
    return head + padded(name) + padded(description)


def test_the_build_id_among_other_notes() -> None:
    notes = note(6, b"Linux\0", b"\1") + note(3, b"Xen\0", b"\2" * 8) + note(3, b"GNU\0", ID)
    assert identity.build_id_of(notes) == ID.hex()
    assert identity.build_id_of(notes + note(3, b"GNU\0", b"\3" * 20)) == ID.hex()


@pytest.mark.parametrize(
    "notes",
    [
        b"",
        note(1, b"GNU\0", ID),
        note(3, b"GNU\0", b""),
        note(3, b"GNU\0", ID)[:-4],
        struct.pack("=III", 4, 0xFFFFFFFF, 3) + b"GNU\0" + ID,
        struct.pack("=III", 0xFFFFFFFF, 20, 3) + b"GNU\0" + ID,
    ],
)
def test_no_build_id(notes: bytes) -> None:
    assert identity.build_id_of(notes) is None


@given(st.binary(max_size=200))
def test_no_notes_make_it_raise(notes: bytes) -> None:
    found = identity.build_id_of(notes)
    assert found is None or bytes.fromhex(found) in notes


def test_missing_files(tmp_path: Path) -> None:
    assert identity.build_id(str(tmp_path / "notes")) is None
    assert identity.boot_id(str(tmp_path / "boot_id")) is None


def test_this_kernel() -> None:
    assert identity.release() == Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert identity.hostname() == Path("/proc/sys/kernel/hostname").read_text().strip()
    boot = identity.boot_id()
    assert boot is not None
    assert str(uuid.UUID(boot)) == boot


def test_this_kernels_build_id_as_readelf_sees_it(tmp_path: Path) -> None:
    notes = Path("/sys/kernel/notes")
    if not os.access(notes, os.R_OK):
        pytest.skip("/sys/kernel/notes is not readable")
    missing = [tool for tool in ("as", "objcopy", "readelf") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"binutils are not installed: {missing}")
    raw, empty, image = (str(tmp_path / name) for name in ("notes", "empty.o", "notes.o"))
    Path(raw).write_bytes(notes.read_bytes())
    subprocess.run(["as", "-o", empty, os.devnull], check=True)
    flags = "--set-section-flags=.note.x=alloc,readonly"
    subprocess.run(["objcopy", f"--add-section=.note.x={raw}", flags, empty, image], check=True)
    said = subprocess.run(["readelf", "-n", image], capture_output=True, text=True, check=True)
    found = identity.build_id()
    if found is None:
        assert "Build ID" not in said.stdout
    else:
        assert f"Build ID: {found}" in said.stdout


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", 1), ("0-3\n", 4), ("0,2-3,8\n", 4), ("", 1), ("odd\n", 1)]
)
def test_nodes_are_counted(tmp_path: Path, text: str, nodes: int) -> None:
    path = tmp_path / "possible"
    path.write_text(text)
    assert identity.possible_nodes(str(path)) == nodes
    assert identity.possible_nodes(str(tmp_path / "none")) == 1
