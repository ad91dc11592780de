"""The hooks beside the resolver, and what a plugin costs that nobody asks.

A batch is 32 addresses with one time, asked through ``manager.hook`` and of the resolver
itself, in turn, over the same table: callchains as kernels have them, nearly all static and
so found at once, where what pluggy adds weighs most; and batches of BPF alone. CPU time.

The idle plugin follows this kernel while another process loads and unloads programs,
100 changes a second and one at a time. CPU time of the process, all threads.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time

from bench import workload
from bench.bench_timeline import chains_of, pairs_of, statics
from bench.measure import REPO, in_child, in_turn, settle
from bench.report import CPU, not_measured, row
from ksym_hooks import get_plugin_manager, hookimpl
from ksym_plugin import plugin
from ksym_plugin.timeline.tracker import Source
from tests.oracle import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ksym_hooks import KsymPluginManager
    from ksym_plugin.plugin.follower import Follower
    from ksym_plugin.timeline.symbols import Load

LIVE, BATCHES, ROUNDS, SECONDS = 2_000, 2_000, 7, 10
QUICK = (100, 100, 2, 1)
DEPTH = 32
#: Changes a second, by one load and one unload in turn.
RATE = 100
_IDLE = f"idle plugin at {RATE} changes/s"
_IDLE_BAR = ("<=", 1.0)


class Standing(Source):
    """Programs that stay."""

    name = "standing"
    interval = 3600.0

    def __init__(self, loads: list[Load]) -> None:
        super().__init__()
        self._loads = loads

    def read(self) -> list[Any]:
        return []

    def snapshot(self) -> list[Load]:
        return list(self._loads)


@contextlib.contextmanager
def following(loads: list[Load]) -> Iterator[tuple[KsymPluginManager, Follower]]:
    """A host whose plugin holds ``loads`` and the static symbols of the workload."""

    class Sources:
        @hookimpl
        def ksym_sources(self) -> dict[str, Any]:
            return {"standing": lambda: Standing(loads)}

    os.environ[plugin.SOURCE] = "standing"
    with get_plugin_manager() as manager:
        manager.register(Sources())
        manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
        follower = plugin.begin()
        if follower is None:
            raise RuntimeError("the plugin has not begun")
        follower.table.use_statics(statics())
        yield manager, follower


def overheads(live: int, count: int, rounds: int) -> list[dict[str, Any]]:
    loads, _ = workload.populated(live, 0)
    with following(loads) as (manager, follower):
        table = follower.table
        # The same objects that the hook gets to, without the way there.
        resolver, timeline = table._resolver, table.tracker.timeline
        at = table.tracker.covered
        pairs = pairs_of(timeline, count * DEPTH, at)
        addresses = [address for address, _ in pairs]
        random.Random(5).shuffle(addresses)
        chains = [chain + chain[: DEPTH - len(chain)] for chain, _ in chains_of(pairs, count)]
        groups = {
            "callchains": chains,
            "BPF alone": [addresses[at : at + DEPTH] for at in range(0, len(addresses), DEPTH)],
        }
        settle()
        return [judge(name, manager, resolver, group, at, rounds) for name, group in groups.items()]


def judge(
    name: str,
    manager: KsymPluginManager,
    resolver: Any,
    batches: list[list[int]],
    at: int,
    rounds: int,
) -> dict[str, Any]:
    hook = manager.hook.ksym_resolve_frames

    def through_hook() -> None:
        for batch in batches:
            hook(addresses=batch, time=at, clock="monotonic")

    def directly() -> None:
        for batch in batches:
            resolver.frames(batch, at)

    hooked, direct = in_turn(rounds, lambda: through_hook, lambda: directly)
    return row(
        f"a batch of {DEPTH} through the hook, {name}",
        hooked.over(direct),
        "times",
        ("<=", 1.5),
        CPU,
        "the resolver itself",
        1,
        f"{hooked.median / len(batches) * 1e6:.1f} us against "
        f"{direct.median / len(batches) * 1e6:.1f} us",
    )


def idle(seconds: int) -> tuple[float, float, int]:
    """Percent of a core at rest, and while programs come and go; and the changes there were."""
    pause = 1000 / RATE
    with get_plugin_manager() as manager:
        manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
        follower = plugin.begin()
        if follower is None:
            raise RuntimeError("the plugin has not begun")
        resting = _percent(lambda: time.sleep(seconds))
        before = follower.table.generation
        loads = seconds * RATE // 2
        command = [sys.executable, "-m", "bench.live_loader", str(loads), str(pause)]
        busy = _percent(lambda: _wait_for(command))
        return resting, busy, follower.table.generation - before


def _wait_for(command: list[str]) -> None:
    subprocess.run(command, cwd=REPO, stdout=subprocess.DEVNULL, check=True, timeout=60)


def _percent(work: Any) -> float:
    cpu, wall = time.process_time(), time.monotonic()
    work()
    return 100 * (time.process_time() - cpu) / (time.monotonic() - wall)


def rows(quick: bool) -> list[dict[str, Any]]:
    live, count, rounds, seconds = QUICK if quick else (LIVE, BATCHES, ROUNDS, SECONDS)
    found: list[dict[str, Any]] = in_child("bench_hooks", "overheads", live, count, rounds)
    why = "needs root" if os.geteuid() else ""
    if not why:
        state, reason = probe.ask()
        why = "" if state == probe.ANSWERS else reason
    if why:
        return [*found, not_measured(_IDLE, "% of a core", _IDLE_BAR, why)]
    resting, busy, generations = in_child("bench_hooks", "idle", seconds, seconds=120)
    note = f"{seconds} s, read in {generations} turns; at rest {resting:.2f} %"
    return [*found, row(_IDLE, busy, "% of a core", _IDLE_BAR, CPU, note=note)]
