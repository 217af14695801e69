"""Who may share cached state, and where the tokens of a prompt are found: identity, chained keys, a radix tree.

Knows token ids and bytes. Does not know arrays of KV, models, files, time or what a node's payload means.
"""
