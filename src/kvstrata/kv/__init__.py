"""KV of sequences and of the prefix cache: live layers, spans, their precision, and how they become bytes."""
