"""Benchmarks for users, one module for each. They return plain values; the command prints them as a table or as
JSON."""
