"""Which history is taken, and which boot in it."""

from __future__ import annotations

import errno
import os
import time

import pytest

from ksym_plugin.history import locate
from ksym_plugin.history.locate import Choice, Origin
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import Instant
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
    assert locate.find(Choice(), str(data)) is None

    (place / "system.db").touch()
    assert locate.find(Choice(), str(data)) == str(place / "system.db")

    (data.parent / "ksym.db").touch()
    assert locate.find(Choice(), str(data)) == str(data.parent / "ksym.db")
    assert locate.find(Choice(), None) == str(place / "system.db")

    (place / "ksym.db").touch()
    for here in (None, "-", "perf.data"):
        assert locate.find(Choice(), here) == "ksym.db"

    monkeypatch.setenv("KSYM_HISTORY", "named/by/the/shell.db")
    assert locate.find(Choice(), str(data)) == "named/by/the/shell.db"
    assert locate.find(Choice("given.db"), str(data)) == "given.db"


def test_a_history_that_may_not_be_looked_for_is_not_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    # As an ordinary user meets it in root's folder; root itself may look everywhere.
    monkeypatch.setattr(os, "stat", closed)
    assert locate.find(Choice(), "closed/perf.data") == "closed/ksym.db"


SECOND = 1_000_000_000
#: Where the kernel lies without KASLR, and with it.
PLAIN, RANDOM = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_9D20_0000
#: Boot, build id, release, host, where the kernel lay, seconds recorded.
BOOTS = (
    ("first", "aa", "6.1.0", "here", PLAIN, (100, 200)),
    ("second", "bb", "6.12.0", "here", PLAIN, (100, 200)),
    ("third", "bb", "6.12.0", "there", PLAIN, (5, 20)),
    ("fourth", "bb", "6.12.0", "there", PLAIN, (15, 90)),
    ("fifth", "bb", "6.12.0", "there", RANDOM, (5, 500)),
    ("sixth", "cc", "6.13.0", "there", None, (5, 500)),
)


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A history of several boots, none of them this system's; perf's clock is 2 s behind."""
    path = str(tmp_path / "several.db")
    for *values, text_start, (started, covered) in BOOTS:
        names = ("boot_id", "build_id", "release", "hostname")
        for name, value in zip(names, values):
            monkeypatch.setattr(identity, name, lambda value=value: value)
        writer = HistoryWriter(path, "made up", started * SECOND, text_start)
        writer.tick(Instant(started * SECOND, 0, 0, (started - 2) * SECOND))
        writer.close(covered * SECOND)
    monkeypatch.setattr(identity, "boot_id", lambda: "of no boot there")
    return path


def spans(first: float, last: float, *clocks: str) -> dict[str, tuple[int, int]]:
    times = (int(first * SECOND), int(last * SECOND))
    return dict.fromkeys(clocks or ("monotonic",), times)


def chosen_of(path: str, origin: Origin | None, asked: str | None = None) -> str | None:
    """The boot that is opened, those among which a user has to choose, or None for none."""
    try:
        with locate.open_boot(path, print, origin, asked) as recorded:
            return recorded.boot.boot_id
    except HistoryError as error:
        if "no record of the kernel this perf.data is from" in str(error):
            return None
        return ", ".join(name for name, *_ in BOOTS if f"boot {name}" in str(error))


KERNEL = {"build_id": "bb", "text_start": PLAIN, "release": "6.12.0"}


@pytest.mark.parametrize(
    "known, chosen",
    [
        ({"build_id": "aa"}, "first"),
        ({"build_id": "cc", "text_start": PLAIN}, "sixth"),
        ({"text_start": RANDOM, "release": "6.12.0"}, "fifth"),
        ({"release": "6.1.0"}, "first"),
        # Nothing that is known of the kernel may differ.
        ({"build_id": "dd"}, None),
        ({"text_start": PLAIN + 1, "release": "6.12.0"}, None),
        ({"build_id": "aa", "release": "6.12.0"}, None),
        # A container has a host name of its own; without it nothing tells kernels apart.
        ({"build_id": "aa", "text_start": PLAIN, "host": "pod"}, "first"),
        ({"release": "6.1.0", "host": "pod"}, None),
        # Boots alike: by the times of the samples, then by the host.
        ({**KERNEL, "host": "pod", "times": spans(150, 160)}, "second"),
        ({**KERNEL, "times": spans(40, 150)}, "second, fourth"),
        ({**KERNEL, "times": spans(40, 150), "host": "here"}, "second"),
        ({**KERNEL, "times": spans(6, 7)}, "third"),
        ({**KERNEL, "times": spans(16, 17)}, "third, fourth"),
        ({**KERNEL, "times": spans(14, 14.5)}, "third"),
        ({**KERNEL, "times": spans(14, 14.5, "perf")}, "third, fourth"),
        ({**KERNEL, "times": spans(14, 14.5, "perf", "monotonic")}, "third, fourth"),
        ({**KERNEL, "times": spans(99, 99.5, "perf")}, "second"),
        ({**KERNEL, "times": spans(1000, 2000)}, "second, third, fourth"),
        (KERNEL, "second, third, fourth"),
        # Where functions lie tells the kernels apart as well.
        ({"core": (RANDOM, RANDOM + 0x2FF_FFFF), "times": spans(6, 7)}, "fifth, sixth"),
        ({"core": (PLAIN, RANDOM)}, "sixth"),
        # What comes through a pipe can be of this boot alone.
        ({"this_boot_only": True}, None),
    ],
)
def test_the_boot_that_fits(several: str, known: dict[str, Any], chosen: str | None) -> None:
    assert chosen_of(several, Origin("perf.data", **known)) == chosen


@pytest.mark.parametrize(
    "here, known, chosen",
    [
        ("first", None, "first"),
        ("", None, "sixth"),
        # Without times no frame is named by the history: the boot does not matter.
        ("third", {"times": {}}, "third"),
        ("third", {"this_boot_only": True}, "third"),
        # This boot has the times, or it has not come to them yet.
        ("third", {**KERNEL, "times": spans(6, 7)}, "third"),
        ("third", {**KERNEL, "times": spans(150, 160)}, "second"),
        ("first", {"build_id": "aa", "times": spans(150, 160)}, "first"),
        ("first", {"build_id": "aa", "times": spans(1, 1e9)}, None),
        ("second", {**KERNEL, "times": spans(1e9, 2e9), "host": "there"}, "third, fourth"),
    ],
)
def test_this_boot(
    several: str,
    here: str,
    known: dict[str, Any] | None,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "boot_id", lambda: here)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 300 * SECOND)
    origin = None if known is None else Origin("perf.data", **known)
    assert chosen_of(several, origin) == chosen


@pytest.mark.parametrize(
    "asked, known, chosen",
    [
        ("3", {**KERNEL, "times": spans(16, 17)}, "third"),
        ("fou", {**KERNEL, "times": spans(16, 17)}, "fourth"),
        ("1", None, "first"),
        # By hand, whatever the host and the times say, but never of another kernel.
        ("second", {**KERNEL, "host": "pod", "times": spans(1000, 2000)}, "second"),
        ("4", {"this_boot_only": True}, "fourth"),
        ("first", KERNEL, "from another kernel than boot first"),
        ("fi", None, "no boot fi, or several that begin so"),
        ("7", None, "no boot 7"),
    ],
)
def test_the_boot_that_is_asked_for(
    several: str, asked: str, known: dict[str, Any] | None, chosen: str
) -> None:
    origin = None if known is None else Origin("perf.data", **known)
    if chosen in [name for name, *_ in BOOTS]:
        assert chosen_of(several, origin, asked) == chosen
        return
    with pytest.raises(HistoryError, match=chosen):
        locate.open_boot(several, print, origin, asked)


def test_another_host_is_said_once(several: str) -> None:
    messages: list[str] = []
    origin = Origin("perf.data", build_id="aa", text_start=PLAIN, host="pod")
    locate.open_boot(several, messages.append, origin).close()
    assert [message for message in messages if "pod" in message] == [
        "the perf.data is of the kernel of here, under the host name pod"
    ]


def test_it_is_said_which_of_several(several: str, tmp_path: Path) -> None:
    messages: list[str] = []
    locate.open_boot(several, messages.append).close()
    (notice,) = messages
    assert "6 boots" in notice and "there" in notice and "6.13.0" in notice
    messages.clear()
    path = str(tmp_path / "one.db")
    HistoryWriter(path, "made up", 0, None).close(1)
    locate.open_boot(path, messages.append).close()
    assert messages == []
