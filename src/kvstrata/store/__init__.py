"""What was computed before, kept within a budget: who may be evicted, in which order, and why."""
