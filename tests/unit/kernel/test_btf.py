"""What a trampoline's key means, on BTF made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksym_plugin.kernel.btf import IN_BTF, Targets
from tests.oracle import programs

FUNCTIONS = ["vfs_read", "vfs_write"]


def targets(tmp_path: Path) -> Targets:
    """The kernel's types are those of BTF object 1."""
    path = tmp_path / "vmlinux"
    path.write_bytes(programs.btf(FUNCTIONS))
    return Targets(str(path), lambda btf_id: btf_id == 1)


def test_a_key_is_an_object_and_a_type_in_it(tmp_path: Path) -> None:
    known = targets(tmp_path)
    keys = [1 << 32 | IN_BTF | programs._FIRST_FUNC + at for at in range(3)]
    assert [known.name(key) for key in keys] == [*FUNCTIONS, ""]


@pytest.mark.parametrize("key", [0, 5, 1 << 32 | 5, 2 << 32 | IN_BTF | 5, 1 << 32 | IN_BTF | 1])
def test_what_is_no_function_of_the_image_has_no_name(key: int, tmp_path: Path) -> None:
    assert targets(tmp_path).name(key) == ""
