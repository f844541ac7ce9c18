"""A deterministic world for the core: the same scheduler under a virtual clock, with workloads, faults and figures."""
