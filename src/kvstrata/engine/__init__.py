"""Continuous batching: requests in, tokens out. `StepExecutor.step()` is schedule, run, postprocess.

Knows requests, sequences and the model. Does not know HTTP.
"""
