"""The peer of look-ups: ``BPF.ksym`` of iovisor's bcc, from the distribution's Python.

It reads kallsyms once and knows no time; a look-up is an address alone. Measured over
random addresses of kernel text, in the system's own interpreter.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess

from bench.measure import SYSTEM_PYTHON, Figures

NAME = "bcc BPF.ksym"
_MISSING = (
    "peer not installed (apt install python3-bpfcc); documented, not measured here:"
    " 240,000 look-ups/s"
)
_CODE = """
import json, random, sys, time
try:
    from bcc import BPF
except ImportError:
    sys.exit(3)
pick = random.Random(1)
addresses = [0xffffffff81000000 + pick.randrange(1 << 23) for _ in range(50000)]
BPF.ksym(addresses[0])
taken = []
for _ in range(int(sys.argv[1])):
    began = time.process_time()
    for address in addresses:
        BPF.ksym(address)
    taken.append(time.process_time() - began)
print(json.dumps([len(addresses) / seconds for seconds in taken]))
"""


@functools.cache
def look_ups_per_second(rounds: int) -> tuple[str, Figures | None, str]:
    """The peer's name, its figures, and a remark; or no figures and why."""
    command = [SYSTEM_PYTHON, "-c", _CODE, str(rounds)]
    if not os.path.exists(SYSTEM_PYTHON):
        return NAME, None, _MISSING
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 3:
        return NAME, None, _MISSING
    if done.returncode:
        return NAME, None, f"bcc failed: {done.stderr.strip().splitlines()[-1:]}"
    return NAME, Figures(json.loads(done.stdout)), "the peer knows no time"
