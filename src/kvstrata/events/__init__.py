"""What memory holds, published for routers in the form that vLLM has made known: KV events over ZMQ.

Knows which tokens came and went, and how that is said on the wire. Does not know who listens or how they route.
"""
