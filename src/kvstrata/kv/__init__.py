"""KV of sequences and of the prefix cache: live layers, spans, their precision, and their conversion to bytes."""
