"""A tick makes the descriptor readable, and clearing it makes it unreadable again."""

from __future__ import annotations

import select

from ksym_plugin.kernel.syscalls import Ticker


def wait(ticker: Ticker, seconds: float) -> bool:
    return bool(select.select([ticker.fd], [], [], seconds)[0])


def test_ticks_come_again_and_again_and_are_cleared_once_each() -> None:
    ticker = Ticker(0.05)
    try:
        assert not ticker.clear()
        for _ in range(3):
            assert wait(ticker, 5)
            assert ticker.clear()
            assert not ticker.clear()
    finally:
        ticker.close()
    ticker.close()


def test_a_tick_that_was_cleared_late_does_not_hide_the_next() -> None:
    ticker = Ticker(0.1)
    try:
        assert wait(ticker, 5)
        select.select([], [], [], 0.19)
        assert ticker.clear()
        # The next one is due within 0.1 s of whenever that was, and clear() must see it.
        assert wait(ticker, 5)
        assert ticker.clear()
    finally:
        ticker.close()
