"""Names kernel addresses given one to a line on standard input, for as long as they come.

Answers at once, from a cache that lasts as long as nothing changes.
"""

import sys

from ksym_hooks import get_plugin_manager, hookimpl, is_frame


class Cache:
    def __init__(self, manager):
        self.manager, self.generation, self.kept = manager, 0, {}
        manager.register(self, "cache")

    @hookimpl
    def ksym_symbols_changed(self, generation):
        self.generation, self.kept = generation, {}

    @hookimpl
    def ksym_events_lost(self):
        self.kept = {}

    def name(self, address):
        key = address, self.generation
        if key not in self.kept:
            self.kept[key] = self._ask(address)
        return self.kept[key]

    def _ask(self, address):
        hook = self.manager.hook
        (answer,) = hook.ksym_resolve_frames(addresses=[address], time=None, clock="monotonic")
        if is_frame(answer):
            return f"{hook.ksym_format_frame(frame=answer)}+{answer.offset:#x}"
        return f"[{answer.text}]"


def main():
    with get_plugin_manager() as manager:
        cache = Cache(manager)
        for line in sys.stdin:
            print(cache.name(int(line, 16)), flush=True)
