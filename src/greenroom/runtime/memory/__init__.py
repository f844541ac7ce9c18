"""Device memory: what is measured, what models need, and whether a move may use it."""
