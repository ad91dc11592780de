"""Benchmarks, each beside its peer: ``python -m bench``. They report, and gate nothing."""
