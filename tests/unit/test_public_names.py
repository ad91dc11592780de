"""What ``from ksym_plugin import`` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ksym_plugin

NAMES = "Frame KsymError Load Loss Reason SourceError Symbol Unload".split()


def in_a_new_python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_every_public_name_can_be_imported_alone() -> None:
    assert sorted(ksym_plugin.__all__) == NAMES
    for name in NAMES:
        code = f"from ksym_plugin import {name}; print({name}.__name__)"
        assert in_a_new_python(code) == [name]


def test_a_star_import_brings_them_all() -> None:
    assert in_a_new_python(
        "before = set(dir()); from ksym_plugin import *; print(*sorted(set(dir()) - before))"
    ) == sorted([*NAMES, "before"])


def test_nothing_is_loaded_before_a_name_is_asked_for() -> None:
    code = (
        "import sys, ksym_plugin; ksym_plugin.__version__;"
        "print(*(name for name in sys.modules if name.startswith('ksym_plugin')))"
    )
    assert in_a_new_python(code) == ["ksym_plugin"]


def test_a_change_and_an_error_are_those_that_the_package_itself_uses() -> None:
    from ksym_plugin.timeline import errors, symbols

    assert ksym_plugin.Load is symbols.Load
    assert ksym_plugin.SourceError is errors.SourceError
    assert issubclass(ksym_plugin.SourceError, ksym_plugin.KsymError)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"ksym_plugin.*no attribute 'Loads'"):
        _ = ksym_plugin.Loads
