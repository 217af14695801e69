"""Servers that `kvstrata bench compare` starts: one class for each, over one protocol (base.py)."""
