"""KV quantization: codecs that encode arrays as planes, which take fewer bits, and decode planes.

Codecs know arrays of shape [..., tokens, dim] and positions. They do not know layers, requests or files. Everything is
frozen and pure; each codec has a module, and `registry` has the names of codecs.
"""
