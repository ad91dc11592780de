"""Which history is taken, and which boot in it."""

from __future__ import annotations

import errno
import os

import pytest

from ksym_plugin.history import locate
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.timeline.errors import HistoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


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
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A history of three boots, none of them this system's."""
    path = str(tmp_path / "several.db")
    for number, values in enumerate(BOOTS):
        names = ("boot_id", "build_id", "release", "hostname")
        for name, value in zip(names, values):
            monkeypatch.setattr(identity, name, lambda value=value: value)
        HistoryWriter(path, "made up", number, None).close(number + 10)
    monkeypatch.setattr(identity, "boot_id", lambda: "of no boot there")
    return path


@pytest.mark.parametrize(
    "here, known, chosen",
    [
        ("", {}, "third"),
        ("first", {}, "first"),
        ("", {"build_id": "aa"}, "first"),
        ("", {"build_id": "bb"}, "third"),
        ("", {"build_id": "bb", "host": "here"}, "second"),
        ("second", {"release": "6.12.0"}, "second"),
        # The data are of another kernel: this system's boot must not name them.
        ("first", {"build_id": "bb"}, "third"),
        ("", {"build_id": "cc"}, None),
        ("first", {"host": "nowhere"}, None),
        ("second", {"this_boot_only": True}, "second"),
        ("", {"this_boot_only": True}, None),
    ],
)
def test_the_boot_that_fits(
    several: str,
    here: str,
    known: dict[str, Any],
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "boot_id", lambda: here)
    origin = locate.Origin("text", **known)
    if chosen is None:
        with pytest.raises(HistoryError, match="no record of the kernel this text is from"):
            locate.open_boot(several, print, origin)
        return
    with locate.open_boot(several, print, origin) as recorded:
        assert recorded.boot.boot_id == chosen


def test_it_is_said_which_of_several(several: str, tmp_path: Path) -> None:
    messages: list[str] = []
    locate.open_boot(several, messages.append).close()
    (notice,) = messages
    assert "3 boots" in notice and "there" in notice and "6.12.0" in notice
    messages.clear()
    path = str(tmp_path / "one.db")
    HistoryWriter(path, "made up", 0, None).close(1)
    locate.open_boot(path, messages.append).close()
    assert messages == []
