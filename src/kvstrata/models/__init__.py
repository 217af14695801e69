"""Gets, checks and loads models. Knows files and mlx-lm; knows nothing of requests, caches or HTTP."""
