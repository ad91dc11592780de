"""The wheel: what is in it, and that an environment with nothing but the wheel works."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

import ksym_plugin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BESIDE = ("ksym_handler.py", "bin/ksym-record", "bin/ksym-report")

pytest.importorskip("hatchling", reason="building a wheel needs hatchling")


def run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        cwd="/",
        env=environment,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def package_files() -> set[str]:
    return {
        os.path.relpath(os.path.join(folder, file), os.path.dirname(package))
        for package in (
            os.path.join(REPO, "ksym_plugin"),
            os.path.join(REPO, "hooks", "ksym_hooks"),
        )
        for folder, _, files in os.walk(package)
        for file in files
        if file.endswith(".py") or file == "py.typed"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-c"),
        "import os, sys; os.chdir(sys.argv[1]);"
        "from hatchling.build import build_wheel; build_wheel(sys.argv[2])",
        *(REPO, str(folder)),
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that has the wheel and none of its dependencies."""
    folder = str(tmp_path_factory.mktemp("environment"))
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = os.path.join(folder, "bin", "python")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return python


def test_wheel_is_for_any_python_and_named_after_the_version(wheel: Path) -> None:
    assert wheel.name == f"ksym_plugin-{ksym_plugin.__version__}-py3-none-any.whl"


def test_wheel_holds_the_package_and_what_perf_runs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert package_files() <= names
    assert {f"ksym_plugin/_contrib/{name}" for name in BESIDE} <= names
    assert [name for name in names if "_bpf/" in name] == ["ksym_plugin/_bpf/ksym_events.c"]


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"ksym_plugin", "ksym_hooks", f"ksym_plugin-{ksym_plugin.__version__}.dist-info"}


def test_wheel_has_the_plugin_s_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        lines = archive.read(name).decode().splitlines()
    assert lines[lines.index("[ksym]") + 1] == "ksym = ksym_plugin.plugin"


def test_installed_package_imports_from_the_environment(python: str) -> None:
    where = run(python, "-c", "import ksym_plugin; print(ksym_plugin.__file__)").strip()
    assert where.startswith(os.path.dirname(os.path.dirname(python)))


def test_installed_files_are_the_checkout_s(python: str) -> None:
    where = run(python, "-c", "import ksym_plugin; print(ksym_plugin.__path__[0])").strip()
    for name in BESIDE:
        installed = os.path.join(where, "_contrib", name)
        original = os.path.join(REPO, "contrib", "perf-script", name)
        with open(installed, "rb") as one, open(original, "rb") as other:
            assert one.read() == other.read()
        assert os.access(installed, os.X_OK) == os.access(original, os.X_OK)


def test_the_probe_s_source_is_found_when_installed(python: str) -> None:
    found = "from ksym_plugin.sources.bcc_loader import source_text; print(len(source_text()))"
    length = int(run(python, "-c", found))
    assert length == os.path.getsize(os.path.join(REPO, "bpf", "ksym_events.c"))


def test_the_command_is_installed(python: str) -> None:
    command = os.path.join(os.path.dirname(python), "ksym")
    with open(command, encoding="utf-8") as file:
        assert "from ksym_plugin.cli import main" in file.read()
