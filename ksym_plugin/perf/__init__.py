"""perf: its data's header, its scripts' events, its text."""
