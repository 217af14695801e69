"""Prefix cache: KV of token sequences, shared by a radix tree, kept within a memory budget, offloaded to tiers."""
