"""What the live tests hold against the project: raw system calls and perf, none of our code.

Nothing here imports ksym_plugin or ksym_hooks.
"""
