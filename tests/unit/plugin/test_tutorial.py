"""What the tutorial prints is built, installed into a fresh environment, and run there.

Three distributions: this one, the tutorial's source, and an example host, which spells names
its own way. The environment has pluggy besides, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from importlib import metadata

import pytest

from ksym_hooks import get_plugin_manager
from ksym_plugin.plugin import follower
from ksym_plugin.timeline.symbols import VACANT
from tests.unit.hosts import Offers, Scripted, wait_until
from tests.unit.listings import REPO, listings
from tests.unit.test_packaging import run

START = 0xFFFF_FFFF_C0A0_0000

pytest.importorskip("hatchling", reason="building a wheel needs hatchling")


@pytest.mark.parametrize("name", ["host.py", "accelerator_source.py"])
def test_a_listing_has_thirty_lines_at_the_most(name):
    lines = [line for line in listings()[name].splitlines() if line.strip()]
    assert 10 < len(lines) <= 30
    assert max(map(len, lines)) <= 100


def build(folder, into):
    run(
        *(sys.executable, "-c"),
        "import os, sys; os.chdir(sys.argv[1]);"
        "from hatchling.build import build_wheel; build_wheel(sys.argv[2])",
        *(str(folder), str(into)),
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with the three distributions and pluggy."""
    folder, wheels = tmp_path_factory.mktemp("tutorial"), tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "accelerator_source.py"):
        (source / name).write_text(listings()[name])
    for each in (REPO, source, os.path.join(REPO, "tests", "examples", "host")):
        build(each, wheels)
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "env"))
    python = str(folder / "env" / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *map(str, wheels.glob("*.whl")))
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    for file in metadata.distribution("pluggy").files or ():
        target = os.path.join(site, str(file))
        if ".." not in file.parts and "__pycache__" not in file.parts:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(file.locate(), target)
    return python


class Host:
    """The example host at work, asked and answering line by line."""

    def __init__(self, python, log):
        command = os.path.join(os.path.dirname(python), "example-host")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.process = subprocess.Popen(
            [command],
            cwd="/",
            env={**environment, "KSYM_SOURCE": "accelerator", "ACCELERATOR_LOG": str(log)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._limit = threading.Timer(60, self.process.kill)
        self._limit.start()

    def ask(self, address):
        self.process.stdin.write(f"{address:x}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        _, err = self.process.communicate(timeout=30)
        self._limit.cancel()
        return self.process.returncode, err


def test_a_host_asks_a_third_party_s_source_and_spells_its_own_way(python, tmp_path):
    log = tmp_path / "accelerator.log"
    began = time.monotonic_ns()
    log.write_text(f"{began} {START:x} {START + 0x100:x} first\n")
    host = Host(python, log)
    try:
        assert host.ask(START + 4) == "<first>+0x4"
        with log.open("a") as file:
            file.write(f"{time.monotonic_ns()} {START:x} 0 first\n")
            file.write(f"{time.monotonic_ns()} {START:x} {START + 0x80:x} second\n")
        wait_until(lambda: host.ask(START + 4) == "<second>+0x4")
        assert host.ask(START + 0x90) == f"[{VACANT.text}]"
        assert host.ask(0x1000) == "[a user address]"
    finally:
        status, err = host.end()
    assert (status, err) == (0, "")


def test_a_source_that_cannot_start_is_named_with_its_remedy(python, tmp_path):
    host = Host(python, tmp_path / "nothing")
    answer = host.ask(START + 4)
    status, err = host.end()
    assert status == 0
    assert answer == "[changes around that time may have been lost]" or "hidden" in answer
    assert "PluginWarning: ksym: source accelerator: " in err
    assert f"{tmp_path}/nothing cannot be read (No such file or directory); load the driver" in err


def test_all_plugins_are_found_by_their_entry_points(python):
    code = (
        "from ksym_hooks import get_plugin_manager\n"
        "with get_plugin_manager() as manager:\n"
        "    print(*sorted(name for name, plugin in manager.list_name_plugin()))\n"
    )
    assert run(python, "-c", code).split() == [
        "accelerator",
        "defaults",
        "example-spelling",
        "ksym",
    ]


def test_the_cache_of_the_tutorial_drops_what_has_changed(monkeypatch):
    from tests.unit.helpers import BASE, load
    from tests.unit.plugin.test_plugin import A, B, statics

    monkeypatch.setenv("KSYM_SOURCE", "scripted")
    monkeypatch.setattr(follower.Kallsyms, "load", statics)
    names = {}
    exec(compile(listings()["caching.py"], "caching.py", "exec"), names)
    offers = Offers("scripted", lambda: Scripted([load(BASE, 64, A, 1)]))
    with get_plugin_manager() as manager:
        manager.register(offers, "offers")
        cache = names["Cache"](manager)
        wait_until(lambda: cache.name(BASE).certainty == "exact")
        first = cache.name(BASE)
        assert first.name == A
        assert cache.name(BASE) is first
        offers.made[0].put(load(BASE, 64, B, time.monotonic_ns()))
        wait_until(lambda: cache.name(BASE).name == B)
