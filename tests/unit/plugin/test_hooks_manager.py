"""The host's manager: plugins are found, and none can do the host harm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings

import pluggy
import pytest

import ksym_hooks
from ksym_hooks import PluginWarning, get_plugin_manager, hookimpl
from ksym_plugin.timeline.symbols import EXACT, KERNEL, UNKNOWN_ADDRESS, Frame

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
ADDRESSES = [0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0010]
HOOKS = {
    "ksym_resolve_frames",
    "ksym_symbols_changed",
    "ksym_events_lost",
    "ksym_sources",
    "ksym_format_frame",
    "ksym_start",
    "ksym_stop",
}


class Good:
    @hookimpl
    def ksym_resolve_frames(self, addresses, time, clock):
        return [Frame(address, "good", 0, None, KERNEL, EXACT) for address in addresses]


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class HalfFrame:
    """A host would take it for a frame, and find it has no name."""

    text = certainty = EXACT


def resolver_returning(answer):
    class Broken:
        @hookimpl
        def ksym_resolve_frames(self, addresses):
            if isinstance(answer, BaseException):
                raise answer
            return answer

    return Broken()


@pytest.fixture
def manager(monkeypatch):
    """A manager without any plugin of an installation."""
    monkeypatch.setenv("KSYM_DISABLE_PLUGINS", "*")
    with get_plugin_manager() as manager:
        yield manager


def resolve(manager):
    return manager.hook.ksym_resolve_frames(addresses=ADDRESSES, time=None, clock="monotonic")


def named(caught):
    return [str(one.message) for one in caught if one.category is PluginWarning]


def test_the_hooks_are_those_of_the_contract(manager):
    assert {name for name in vars(manager.hook) if name.startswith("ksym_")} == HOOKS
    assert manager.hook.ksym_resolve_frames.spec.opts["firstresult"]
    assert manager.hook.ksym_format_frame.spec.opts["firstresult"]


def test_without_any_plugin_there_are_reasons(manager):
    answers = resolve(manager)
    assert [answer.text for answer in answers] == ["no plugin has an answer"] * 2
    assert not any(map(ksym_hooks.is_frame, answers))


def test_a_frame_is_spelled_by_name_and_marked_where_uncertain(manager):
    spell = manager.hook.ksym_format_frame
    assert spell(frame=Frame(1, "f", 0, None, KERNEL, "exact")) == "f"
    assert spell(frame=Frame(1, "f", 0, None, KERNEL, "grace")) == "f"
    assert spell(frame=Frame(1, "f", 0, None, KERNEL, "gap")) == "f?"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ValueError("broken"), "raised ValueError: broken"),
        (SystemExit(3), "raised SystemExit: 3"),
        (Unspeakable(), "raised Unspeakable; it"),
        ([], "returned 0 answers for 2 addresses"),
        ([UNKNOWN_ADDRESS], "returned 1 answers for 2 addresses"),
        ([UNKNOWN_ADDRESS] * 3, "returned 3 answers for 2 addresses"),
        ("ab", "returned a str instead of a list"),
        (42, "returned a int instead of a list"),
        ([1, 2], "returned a int that is neither frame nor reason"),
        ([UNKNOWN_ADDRESS, None], "returned a NoneType that is neither"),
        ([Frame(ADDRESSES[0], "f", 0, 7, KERNEL, EXACT)] * 2, "returned a Frame that is neither"),
        ([HalfFrame()] * 2, "returned a HalfFrame that is neither"),
        ([Frame(1, None, 0, None, KERNEL, EXACT)] * 2, "returned a Frame that is neither"),
        ([Frame(1, "f", 0, None, KERNEL, EXACT)] * 2, "returned a frame of 0x1 for 0xffffffff81"),
    ],
)
def test_a_broken_plugin_is_passed_over_and_named_once(manager, answer, said):
    manager.register(Good(), "good")
    manager.register(resolver_returning(answer), "broken")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert [frame.name for frame in resolve(manager)] == ["good", "good"]
    (warning,) = named(caught)
    assert warning.startswith("ksym plugin broken: ksym_resolve_frames ")
    assert said in warning


def test_a_plugin_that_leaves_a_batch_to_others_is_not_named(manager):
    manager.register(Good(), "good")
    manager.register(resolver_returning(None), "modest")
    assert [frame.name for frame in resolve(manager)] == ["good", "good"]


def test_a_ctrl_c_reaches_the_host(manager):
    manager.register(resolver_returning(KeyboardInterrupt()), "interrupted")
    with pytest.raises(KeyboardInterrupt):
        resolve(manager)


@pytest.mark.parametrize("answer", [RuntimeError("no"), 7, b"bytes"])
def test_a_broken_spelling_leaves_the_plain_one(manager, answer):
    class Broken:
        @hookimpl
        def ksym_format_frame(self, frame):
            if isinstance(answer, Exception):
                raise answer
            return answer

    manager.register(Broken(), "broken")
    with pytest.warns(PluginWarning, match="ksym plugin broken: ksym_format_frame"):
        spelled = manager.hook.ksym_format_frame(frame=Frame(1, "f", 0, None, KERNEL, EXACT))
    assert spelled == "f"


@pytest.mark.parametrize("answer", [RuntimeError("no"), ["name"], {"name": 1}, {1: print}])
def test_broken_sources_are_left_out(manager, answer):
    class Broken:
        @hookimpl
        def ksym_sources(self):
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Fine:
        @hookimpl
        def ksym_sources(self):
            return {"fine": print}

    manager.register(Broken(), "broken")
    manager.register(Fine(), "fine")
    with pytest.warns(PluginWarning, match="ksym plugin broken: ksym_sources"):
        assert manager.hook.ksym_sources() == [{"fine": print}]


def test_listeners_that_raise_do_not_keep_news_from_others(manager):
    heard = []

    class Deaf:
        @hookimpl
        def ksym_symbols_changed(self):
            raise LookupError

        @hookimpl
        def ksym_events_lost(self):
            raise LookupError

    class Good:
        @hookimpl
        def ksym_symbols_changed(self, generation):
            heard.append(generation)

    manager.register(Good(), "good")
    manager.register(Deaf(), "deaf")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for generation in (1, 2):
            manager.hook.ksym_symbols_changed(added=[], removed=[], generation=generation)
        manager.hook.ksym_events_lost(since=1, until=2, count=None)
    assert heard == [1, 2]
    (warning,) = named(caught)
    assert warning.startswith("ksym plugin deaf: ksym_symbols_changed raised LookupError")


def test_wrappers_are_refused(manager):
    class Wrapper:
        @hookimpl(hookwrapper=True)
        def ksym_resolve_frames(self):
            yield

    with pytest.raises(pluggy.PluginValidationError, match="no wrappers here"):
        manager.register(Wrapper(), "wrapper")
    assert not manager.has_plugin("wrapper")
    assert len(resolve(manager)) == 2


def test_starting_and_stopping_is_told_once_each(manager):
    told = []

    class Told:
        @hookimpl
        def ksym_start(self, manager):
            told.append(("start", manager))

        @hookimpl
        def ksym_stop(self, manager):
            told.append(("stop", manager))

    manager.register(Told(), "told")
    manager.start()
    assert told == []  # it had been started before
    with manager:
        pass
    manager.close()
    assert told == [("stop", manager)]
    with manager:
        pass
    assert told == [("stop", manager), ("start", manager), ("stop", manager)]


def distribution(folder, name, module_text, entry="plugin"):
    """A distribution as installers leave it: a module, and its entry point's metadata."""
    (folder / f"{name}.py").write_text(module_text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ksym]\n{entry} = {name}\n")


FINE = """
from ksym_hooks import hookimpl
@hookimpl
def ksym_format_frame(frame):
    return frame.name.upper()
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def spelled(manager):
    return manager.hook.ksym_format_frame(frame=Frame(1, "f", 0, None, KERNEL, EXACT))


def test_entry_points_are_loaded_by_name(site):
    distribution(site, "loud_one", FINE, "loud")
    with get_plugin_manager() as manager:
        assert manager.has_plugin("loud")
        assert manager.has_plugin("ksym")
        assert spelled(manager) == "F"


@pytest.mark.parametrize("disabled", ["loud", " loud , other", "*"])
def test_disabled_plugins_are_not_even_imported(site, monkeypatch, disabled):
    distribution(site, "loud_two", FINE, "loud")
    monkeypatch.setenv("KSYM_DISABLE_PLUGINS", disabled)
    with get_plugin_manager() as manager:
        assert not manager.has_plugin("loud")
        assert manager.has_plugin("ksym") == (disabled != "*")
        assert spelled(manager) == "f"
    assert "loud_two" not in sys.modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('lacks something')", "raised ImportError: lacks something"),
        ("raise SystemExit", "raised SystemExit"),
        (
            "class Silent(Exception):\n    def __str__(self): raise self\nraise Silent",
            "raised Silent;",
        ),
        ("syntax error", "raised SyntaxError"),
        (
            "from ksym_hooks import hookimpl\n@hookimpl\ndef ksym_resolve_frames(nonsense): 1\n",
            "cannot be registered",
        ),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named_and_left_out(site, text, said):
    distribution(site, "broken_one", text, "broken")
    with pytest.warns(PluginWarning, match="ksym plugin broken: ") as caught:
        manager = get_plugin_manager()
    with manager:
        assert said in str(caught[0].message)
        assert len(caught) == 1
        assert not manager.has_plugin("broken")
        assert spelled(manager) == "f"


def test_a_plugin_that_hangs_for_two_seconds_at_start_does_not_keep_the_host(site):
    distribution(site, "slow_one", "import time\ntime.sleep(2)\n" + FINE, "slow")
    began = time.monotonic()
    with pytest.warns(PluginWarning, match="ksym plugin slow: loading it has taken 1 s") as caught:
        manager = get_plugin_manager()
    assert time.monotonic() - began < 1.9
    with manager:
        assert len(caught) == 1
        assert spelled(manager) == "f"


def test_a_plugin_that_takes_its_time_in_a_hook_is_named(manager, monkeypatch):
    monkeypatch.setattr("ksym_hooks.guard.SLOW", 0.01)

    class Slow:
        @hookimpl
        def ksym_format_frame(self, frame):
            time.sleep(0.02)
            return "slow"

    manager.register(Slow(), "slow")
    with pytest.warns(PluginWarning, match=r"ksym plugin slow: ksym_format_frame took 0\.\d s"):
        assert spelled(manager) == "slow"


def test_where_warnings_are_errors_the_caller_gets_them_and_no_other_thread(site):
    distribution(site, "broken_two", "raise ImportError('lacks something')", "broken")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PluginWarning, match="lacks something"):
            get_plugin_manager()


def test_a_built_in_plugin_that_is_there_and_fails_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ksym_plugin.plugin.table", None)
    monkeypatch.delitem(sys.modules, "ksym_plugin.plugin.follower", raising=False)
    monkeypatch.delitem(sys.modules, "ksym_plugin.plugin", raising=False)
    with pytest.warns(PluginWarning, match="ksym plugin ksym: .*ksym_plugin.plugin.table"):
        manager = get_plugin_manager()
    with manager:
        assert spelled(manager) == "f"


def test_the_hooks_need_pluggy_and_nothing_else():
    code = (
        "import sys; sys.modules['ksym_plugin'] = None\n"
        "before = set(sys.modules)\n"
        "import ksym_hooks\n"
        "tops = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(tops - sys.stdlib_module_names)) if sys.version_info >= (3, 10) else "
        "print('ksym_hooks pluggy')\n"
        "with ksym_hooks.get_plugin_manager() as manager:\n"
        "    print(manager.hook.ksym_resolve_frames(addresses=[1], time=None, clock='perf'))\n"
    )
    hooks = os.path.join(REPO, "hooks")
    environment = {**os.environ, "PYTHONPATH": hooks, "KSYM_DISABLE_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ksym_hooks pluggy\n[Reason(no plugin has an answer)]\n"
