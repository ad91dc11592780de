"""What recording has cost, for ``ksym record --stats``."""

from __future__ import annotations

import os
import resource

from ksym_plugin.cli.output import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.history.recorder import Recorder
    from ksym_plugin.sources import Source


def lines(source: Source, recorder: Recorder, output: str) -> list[str]:
    """A sentence each on the source, on its probe where it has one, and on ourselves."""
    counts = source.stats()
    applied = plural(recorder.changes, "change")
    losses, resyncs = (
        plural(recorder.losses, "loss"),
        plural(max(0, recorder.resyncs - 1), "resync"),
    )
    told = [f"{source.name}: {applied} applied, {losses}, {resyncs}"]
    if "records" in counts:
        told[0] += f"; {plural(counts['records'], 'record')} came, {counts['lost']:,} were lost"
        told[0] += f", the ring holds {counts['ring_bytes'] >> 10:,} KB"
    if "add_runs" in counts:
        told.append(
            "the probe ran "
            + " and ".join(
                f"{counts[f'{kind}_runs']:,} times on {what}s"
                f" ({_each(counts[f'{kind}_ns'], counts[f'{kind}_runs'])})"
                for kind, what in (("add", "load"), ("del", "unload"))
            )
        )
    told.append(_ourselves(output))
    return told


def _each(nanoseconds: int, runs: int) -> str:
    return f"{nanoseconds / runs / 1000:.2f} µs each" if runs else "not measured"


def _ourselves(output: str) -> str:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime
    kept = os.path.getsize(output)
    return f"{cpu:.2f} s of CPU, {used.ru_maxrss / 1024:.0f} MB of memory, {kept} bytes kept"
