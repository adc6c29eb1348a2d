"""Benchmarks, each a module to run from the repository's root: ``python -m tools.bench.models``."""
