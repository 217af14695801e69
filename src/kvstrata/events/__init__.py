"""KV events over ZMQ for routers, in vLLM's form: which tokens entered and left memory.

Does not know the subscribers or how they route.
"""
