"""A browser and a viewer for the tests that look at what people see."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from tests.unit import chromium, viewers
from tests.unit.texts import REFERENCE

#: The browser's window, in pixels.
WIDTH = 1200


def lack(why: str) -> NoReturn:
    """Without a browser nothing can be told; on CI there has to be one."""
    if os.environ.get("CI", "") in ("true", "1"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is in no registry of packages cannot be asked for; without it there is no test."""
    if not REFERENCE:
        left_out = [item for item in items if item.get_closest_marker("reference")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


#: A module's: other tests see to it that no child process is left.
@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    if chromium.find() is None:
        lack("there is no Chromium (Debian: apt-get install chromium)")
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(chromium.Chromium(WIDTH))
        except (chromium.Failed, OSError) as error:
            lack(f"Chromium does not start here: {error}")
        yield opened


@pytest.fixture(scope="module")
def speedscope(browser: chromium.Chromium) -> viewers.Speedscope:
    if not viewers.SPEEDSCOPE.is_dir():
        lack("speedscope is not in build/viewers (with npm: scripts/setup browser)")
    return viewers.Speedscope(browser)
