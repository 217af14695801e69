"""Continuous batching: requests in, tokens out. `Engine.step()` is plan, run, postprocess.

Knows requests, sequences and the model. Does not know HTTP.
"""
