"""Times, spans and sizes as people type them, and times as they are shown."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click
import pytest

from ksym_plugin.cli import options
from ksym_plugin.cli.output import Dial, check_result, open_result
from ksym_plugin.kernel.clocks import ClockMap, Instant


@pytest.mark.parametrize(
    "text, ns",
    [
        ("5741.328403", 5_741_328_403_000),
        ("5741.328403:", 5_741_328_403_000),
        ("5741.328403123", 5_741_328_403_123),
        ("5741", 5_741_000_000_000),
        ("0.000000001", 1),
        ("1732946000.999999999", 1_732_946_000_999_999_999),
    ],
)
def test_a_point_in_time_is_exact(text: str, ns: int) -> None:
    assert options.point(text) == ns


@pytest.mark.parametrize("text", ["", "x", "-1", "1.", ".5", "1e3", "1.0000000001", "1_0", "٣"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        options.point(text)


def test_spans_and_sizes() -> None:
    assert options.span("90") == 90_000_000_000
    assert options.span("1.5h") == 5_400_000_000_000
    assert options.span("7d") == 604_800_000_000_000
    assert [options.size(text) for text in ("1", "4K", "500M", "2GiB")] == [
        1,
        4096,
        524_288_000,
        2_147_483_648,
    ]
    for parse in (options.span, options.size):
        with pytest.raises(click.BadParameter):
            parse("7 parsecs")


def test_a_ring_has_a_size_that_kernels_take() -> None:
    assert [options.ring_size(text) for text in ("4K", "16M", "1G")] == [4096, 1 << 24, 1 << 30]
    for text in ("0", "4095", "1025M", "8G", "large"):
        with pytest.raises(click.BadParameter):
            options.ring_size(text)


def test_a_history_s_bound_that_lacks_its_unit_is_refused() -> None:
    assert [options.history_size(text) for text in ("1M", "1G")] == [1 << 20, 1 << 30]
    for text in ("1", "1023K", "large"):
        with pytest.raises(click.BadParameter):
            options.history_size(text)


def dial(clock: str | None, *instants: Instant) -> Dial:
    return Dial(ClockMap(instants), clock)


def test_the_dial_goes_back_the_way_the_map_came() -> None:
    second = options.SECOND
    # A clock 50 ppm fast, far worse than any in use, and far away.
    instants = [
        Instant(n * second, n * second, 10**18 + n * 1_000_050_000, 7 + n * second)
        for n in range(100, 200, 10)
    ]
    clocks = ClockMap(instants)
    for clock in ("perf", "realtime", "boottime", "monotonic"):
        shown = Dial(clocks, clock)
        for time_ns in (0, 100 * second, 123_456_789_012, 190 * second, 10**15):
            assert abs(clocks.to_monotonic(clock, shown.of(time_ns)) - time_ns) <= 1


def test_the_dial_says_when_perfs_clock_is_not_known() -> None:
    assert dial(None, Instant(1, 1, 1, None)).clock == "monotonic"
    assert dial(None, Instant(1, 1, 1, 5)).clock == "perf"


def test_windows_say_how_much_earlier() -> None:
    shown = dial("monotonic")
    second = options.SECOND
    assert shown.window(5 * second, 5 * second) == "5.000000"
    assert shown.window(5 * second - 2_000_000, 5 * second) == "5.000000 (-2 ms)"
    assert shown.window(0, 5 * second) == "before 5.000000"
    assert shown.window(None, None) == "-"


@pytest.mark.parametrize(
    "path, problem",
    [("", "Is a directory"), ("none/x", "No such file or directory"), ("there", ""), ("new", "")],
)
def test_where_no_result_can_be_written_is_said_before_there_is_one(
    tmp_path: Path, path: str, problem: str
) -> None:
    (tmp_path / "there").touch()
    if not problem:
        check_result(str(tmp_path / path))
        return
    with pytest.raises(OSError, match=problem) as caught:
        check_result(str(tmp_path / path))
    assert caught.value.filename == str(tmp_path / path)


@pytest.mark.parametrize(
    "path, problem", [("", "Is a directory"), ("none/x", "No such file"), ("there/x", "Not a dir")]
)
def test_an_error_names_the_file_that_was_asked_for(
    tmp_path: Path, path: str, problem: str
) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(OSError, match=problem) as caught, open_result(str(tmp_path / path)):
        pytest.fail("it was opened")
    assert caught.value.filename == str(tmp_path / path)


def test_a_file_without_a_name_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OSError, match="Is a directory") as caught, open_result(""):
        pytest.fail("it was opened")
    assert caught.value.filename == ""
    check_result("")  # It is not wanted then.


def test_so_does_an_error_when_it_is_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(source: str, target: str) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", source, None, target)

    path = tmp_path / "mounted"
    path.touch()
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="busy") as caught, open_result(str(path)) as file:
        file.write(b"result")
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["mounted"]
