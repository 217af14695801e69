"""Tiers below memory: a disk, a store that servers share, and files that carry a conversation. Bytes only, no MLX."""
