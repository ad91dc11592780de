"""Kernel frames, BPF above all, named as they were at the instant they were sampled.

Importing this package imports nothing else. The core (everything outside ``plugin``
and ``cli``) needs only the standard library, because perf's embedded interpreter has
nothing more.
"""

__version__ = "0.1.0"
