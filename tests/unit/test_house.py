"""The order of the rooms holds, and what holds it would notice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import house

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10"
)


def test_no_import_breaks_a_rule() -> None:
    assert house.House().broken() == []


def test_the_rooms_are_the_nine_and_few_floors() -> None:
    built = house.House()
    folders = {entry.name for entry in os.scandir(house.REPO / "ksym_plugin") if entry.is_dir()}
    assert folders - {"__pycache__"} <= set(house.MAY_IMPORT)
    assert max(built.floors().values()) <= 8


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is said of a house of these files."""

    def build(**files: str) -> list[str]:
        for name, text in files.items():
            room, _, file = name.partition("_in_")
            folder = "hooks/ksym_hooks" if room == "hooks" else f"{house.PACKAGE}/{room}"
            path = tmp_path / folder / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(house, "REPO", tmp_path)
        return house.House().broken()

    return build


@pytest.mark.parametrize(
    "text",
    [
        "from ksym_plugin.kernel.clocks import Instant",
        "from ksym_plugin.kernel import clocks",
        "import ksym_plugin.kernel.clocks",
        "def late():\n    from ksym_plugin.kernel import clocks",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from ksym_plugin.kernel import clocks",
    ],
)
def test_an_arrow_upward_is_named(broken, text: str) -> None:
    said = broken(timeline_in_index=text, kernel_in_clocks="")
    at = text.count("\n") + 1
    rule = "timeline may not import ksym_plugin.kernel.clocks; it may import: nothing"
    assert said == [f"ksym_plugin/timeline/index.py:{at}: {rule}"]


def test_an_arrow_down_is_allowed(broken) -> None:
    assert (
        broken(kernel_in_clocks="from ksym_plugin.timeline import index", timeline_in_index="")
        == []
    )


def test_a_circle_is_named(broken) -> None:
    said = broken(
        kernel_in_one="from ksym_plugin.kernel import two",
        kernel_in_two="def late():\n    from ksym_plugin.kernel.one import name",
    )
    assert [line.split(":")[:2] for line in said] == [
        ["ksym_plugin/kernel/one.py", "1"],
        ["ksym_plugin/kernel/two.py", "2"],
    ]
    assert all("circle" in line for line in said)


@pytest.mark.parametrize(
    "room, text, rule",
    [
        ("perf", "import click", "perf is loaded by perf's interpreter, which lacks click"),
        ("kernel", "from elftools.elf import elffile", "kernel is loaded by perf's interpreter"),
        ("history", "def late():\n    import pluggy", "history may not import pluggy"),
        ("sources", "import click", "sources may not import click"),
    ],
)
def test_third_party_code_is_named(broken, room: str, text: str, rule: str) -> None:
    (said,) = broken(**{f"{room}_in_file": text})
    assert rule in said


def test_names_for_type_checkers_are_imported_for_them_alone(broken) -> None:
    text = "from typing_extensions import TypeIs"
    assert broken(hooks_in_types=f"TYPE_CHECKING = False\nif TYPE_CHECKING:\n    {text}") == []
    (said,) = broken(hooks_in_types=text)
    assert "hooks may not import typing_extensions" in said


def test_pyelftools_is_imported_late(broken) -> None:
    assert broken(kernel_in_elf="def late():\n    from elftools.elf import elffile") == []
