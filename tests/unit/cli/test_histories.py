"""Which history is taken, and which boot in it."""

from __future__ import annotations

import errno
import os

import pytest

from ksym_plugin.history import locate
from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, and no history anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KSYM_HISTORY", raising=False)
    monkeypatch.setattr(locate, "SYSTEM", str(tmp_path / "system.db"))
    return tmp_path


def test_the_order_of_places(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = place / "elsewhere" / "perf.data"
    data.parent.mkdir()
    assert locate.find(None, str(data)) is None

    (place / "system.db").touch()
    assert locate.find(None, str(data)) == str(place / "system.db")

    (data.parent / "ksym.db").touch()
    assert locate.find(None, str(data)) == str(data.parent / "ksym.db")
    assert locate.find(None, None) == str(place / "system.db")

    (place / "ksym.db").touch()
    for here in (None, "-", "perf.data"):
        assert locate.find(None, here) == "ksym.db"

    monkeypatch.setenv("KSYM_HISTORY", "named/by/the/shell.db")
    assert locate.find(None, str(data)) == "named/by/the/shell.db"
    assert locate.find("given.db", str(data)) == "given.db"


def test_a_history_that_may_not_be_looked_for_is_not_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    # As an ordinary user meets it in root's folder; root itself may look everywhere.
    monkeypatch.setattr(os, "stat", closed)
    assert locate.find(None, "closed/perf.data") == "closed/ksym.db"


BOOTS = (
    ("first", "aa", "6.1.0", "here"),
    ("second", "bb", "6.12.0", "here"),
    ("third", "bb", "6.12.0", "there"),
)


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    path = str(tmp_path / "several.db")
    for number, values in enumerate(BOOTS):
        names = ("boot_id", "build_id", "release", "hostname")
        for name, value in zip(names, values):
            monkeypatch.setattr(identity, name, lambda value=value: value)
        HistoryWriter(path, "made up", number, None).close(number + 10)
    return History(path)


@pytest.mark.parametrize(
    "known, chosen",
    [
        ({}, "third"),
        ({"boot_id": "first"}, "first"),
        ({"boot_id": "of no boot here"}, "third"),
        ({"build_id": "aa"}, "first"),
        ({"build_id": "bb"}, "third"),
        ({"build_id": "bb", "host": "here"}, "second"),
        ({"release": "6.12.0", "boot_id": "second"}, "second"),
        # The data are of another kernel: this system's boot must not name them.
        ({"build_id": "bb", "boot_id": "first"}, "third"),
        ({"build_id": "cc"}, None),
        ({"host": "nowhere", "boot_id": "first"}, None),
    ],
)
def test_the_boot_that_fits(several: History, known: dict[str, str], chosen: str | None) -> None:
    with several:
        boot = locate.choose_boot(several, **known)
        assert (boot and boot.boot_id) == chosen


def test_it_is_said_which_of_several(several: History, tmp_path: Path) -> None:
    with several:
        boot = locate.choose_boot(several)
        assert boot is not None
        notice = locate.choice_notice(several, boot)
    assert "3 boots" in notice and "there" in notice and "6.12.0" in notice
    path = str(tmp_path / "one.db")
    HistoryWriter(path, "made up", 0, None).close(1)
    with History(path) as history:
        assert locate.choice_notice(history, history.boots()[0]) == ""
