"""``perf script record ksym`` and ``report ksym``: what they run, and how perf gets to know them.

The scripts are run as perf runs them, by ``/bin/sh`` with perf's arguments; perf and ksym are
stand-ins that print what they were called with. Whether perf finds them is asked of the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPTS = os.path.join(REPO, "contrib", "perf-script")
LINKS = ("ksym_handler.py", "bin/ksym-record", "bin/ksym-report")
STAND_IN = '#!/bin/sh\nprintf "%s" "${0##*/}"\nfor word; do printf "|%s" "$word"; done\necho\n'


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={**os.environ, **variables},
        timeout=60,
        text=True,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The scripts as a wheel lays them out, in an environment whose ksym is a stand-in."""
    folder = tmp_path / "env/lib/python3.11/site-packages/ksym_plugin/_contrib"
    shutil.copytree(SCRIPTS, folder)
    executable(tmp_path / "env/bin/ksym", STAND_IN)
    executable(tmp_path / "path/perf", STAND_IN)
    return folder


def call(installed: Path, script: str, *arguments: str) -> str:
    path = f"{installed.parents[5] / 'path'}:/usr/bin:/bin"
    done = run("/bin/sh", str(installed / "bin" / script), *arguments, PATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "history"),
    [
        ("-a", "./ksym.db"),
        ("-F 99 -- make", "./ksym.db"),
        ("-o /a/b/perf.data -a", "/a/b/ksym.db"),
        ("-F 99 -o/a/perf.data -- make", "/a/ksym.db"),
        ("--output=/a/x -- make -o y/z", "/a/ksym.db"),
        ("--output x/y make", "x/ksym.db"),
        ("make -o y/z", "./ksym.db"),
        ("-e cycles make -o y/z", "./ksym.db"),
        ("-p 1 -o y/z", "y/ksym.db"),
        ("-q -o -", "./ksym.db"),
        ("-o", "./ksym.db"),
    ],
)
def test_record_puts_the_history_beside_the_data(
    installed: Path, arguments: str, history: str
) -> None:
    told = "|".join(arguments.split())
    expected = f"ksym|record|-o|{history}|--|perf|record|-g|{told}"
    assert call(installed, "ksym-record", *arguments.split()) == expected


def test_record_keeps_words_whole(installed: Path) -> None:
    output = call(installed, "ksym-record", "-o", "a b/c d", "--", "sh", "-c", "true; false *")
    assert (
        output == "ksym|record|-o|a b/ksym.db|--|perf|record|-g|-o|a b/c d|--|sh|-c|true; false *"
    )


def test_record_without_ksym_says_so_and_records_nothing(installed: Path) -> None:
    (installed.parents[4] / "bin/ksym").unlink()
    path = f"{installed.parents[5] / 'path'}:/usr/bin:/bin"
    done = run("/bin/sh", str(installed / "bin/ksym-record"), "-a", PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ksym-record: there is no ksym command")


@pytest.mark.parametrize(
    ("arguments", "perf", "handler"),
    [
        ("", "", ""),
        ("-i x", "-i|x|", ""),
        ("--input x --format folded", "-i|x|", "|--format|folded"),
        ("-ix -H h.db", "-i|x|", "|-H|h.db"),
        ("--input=x -- --clock monotonic", "-i|x|", "|--clock|monotonic"),
        ("--format folded", "", "|--format|folded"),
        ("-i", "", ""),
    ],
)
def test_report_tells_perf_s_options_from_the_handler_s(
    installed: Path, arguments: str, perf: str, handler: str
) -> None:
    output = call(installed, "ksym-report", *arguments.split())
    script = f"{installed}/bin/../ksym_handler.py"
    assert output == f"perf|script|{perf}-s|{script}|--{handler}"


@pytest.fixture
def exec_path(tmp_path: Path) -> Path:
    """A place for perf's scripts that is not the system's."""
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed")
    (tmp_path / "exec/scripts/python/bin").mkdir(parents=True)
    return tmp_path / "exec"


def install(exec_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(os.path.join(SCRIPTS, "install"), *options, PERF_EXEC_PATH=str(exec_path))


def test_install_links_to_the_checkout_and_uninstall_unlinks(exec_path: Path) -> None:
    folder = exec_path / "scripts/python"
    for _ in range(2):
        assert install(exec_path).returncode == 0
        for link in LINKS:
            assert os.path.realpath(folder / link) == os.path.join(SCRIPTS, link)
    assert install(exec_path, "--uninstall").returncode == 0
    assert [p for p in folder.rglob("*") if not p.is_dir()] == []


def test_install_leaves_alone_what_is_not_its_own(exec_path: Path) -> None:
    other = exec_path / "scripts/python/bin/ksym-report"
    other.write_text("another's", encoding="utf-8")
    for options in ((), ("--uninstall",)):
        done = install(exec_path, *options)
        assert done.returncode == 1
        assert "no link of ours" in done.stderr
    assert other.read_text(encoding="utf-8") == "another's"
    assert not (exec_path / "scripts/python/ksym_handler.py").exists()


def test_perf_lists_it_with_what_it_takes(exec_path: Path) -> None:
    if "libpython: [ on" not in " ".join(run("perf", "version", "--build-options").stdout.split()):
        pytest.skip("this perf was built without libpython")
    assert install(exec_path).returncode == 0
    done = run("perf", "script", "-l", PERF_EXEC_PATH=str(exec_path))
    (listed,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["ksym"]]
    assert "[--format text|folded|svg|speedscope|report]" in listed
    assert "name every kernel frame" in listed
