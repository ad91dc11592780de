"""What a process may do, by a /proc and a /sys written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksym_plugin.kernel.privileges import require_probes
from ksym_plugin.timeline.errors import SourceError

PERFMON, BPF, ADMIN = 1 << 38, 1 << 39, 1 << 21


def required(folder: Path, held: int, lockdown: str) -> None:
    (folder / "self").mkdir(exist_ok=True)
    (folder / "self/status").write_text(f"Name:\tx\nCapEff:\t{held:016x}\n")
    (folder / "lockdown").write_text(lockdown)
    require_probes(str(folder), str(folder))


@pytest.mark.parametrize("held", [0, PERFMON, BPF])
def test_probes_take_both_capabilities_or_root_s(tmp_path: Path, held: int) -> None:
    with pytest.raises(SourceError, match="CAP_BPF and CAP_PERFMON"):
        required(tmp_path, held, "[none] integrity confidentiality\n")


@pytest.mark.parametrize("held", [PERFMON | BPF, ADMIN])
def test_probes_take_a_kernel_that_is_not_locked_down(tmp_path: Path, held: int) -> None:
    with pytest.raises(SourceError, match="lockdown=integrity"):
        required(tmp_path, held, "none integrity [confidentiality]\n")
    required(tmp_path, held, "none [integrity] confidentiality\n")


def test_what_proc_does_not_tell_is_left_to_the_kernel(tmp_path: Path) -> None:
    require_probes(str(tmp_path), str(tmp_path))
