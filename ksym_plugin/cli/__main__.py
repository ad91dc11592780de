"""``python -m ksym_plugin.cli`` is ``ksym``."""

from __future__ import annotations

from ksym_plugin.cli import main

main()
