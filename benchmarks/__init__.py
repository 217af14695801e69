"""Benchmarks for maintainers, run from a checkout: `python -m benchmarks.NAME --help`. The wheel does not have them."""
