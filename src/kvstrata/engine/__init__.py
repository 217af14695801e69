"""Continuous batching: requests in, tokens out. `Loop.step()` is plan, run, postprocess.

Knows requests, sequences and the model. Does not know HTTP.
"""
