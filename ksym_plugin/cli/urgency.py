"""Being woken at once."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_LOWEST_REALTIME: Final = 1


def be_prompt() -> bool:
    """Have the scheduler run this process as soon as it wakes, if that is allowed.

    A source without time stamps knows of a change only that it came before it was read:
    the sooner that is, the fewer samples fall between two programs at one address. The
    recorder sleeps nearly always, the kernel's bandwidth limit for real-time tasks holds
    (sched_rt_runtime_us), and children do not inherit it. Needs CAP_SYS_NICE.
    """
    try:
        os.sched_setscheduler(
            0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_LOWEST_REALTIME)
        )
    except OSError:
        return False
    return True
