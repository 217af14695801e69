"""Prefix cache: KV of token sequences, shared by a radix tree, kept within a memory budget, offloaded to tiers.

Modules import one way, lowest first: values and pure policies (`keys`, `worth`, `radix_tree`, `eviction_order`), the
entry table with everything cached, the parts that read and change it, and `prefix_cache`, which constructs them. The
package knows no request, no sequence and no model.
"""
