"""Rules that can be replaced: the order of the queue, the choice of evictions, which models may be ready together."""
