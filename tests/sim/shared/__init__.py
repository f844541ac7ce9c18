"""Gateways that share GPUs, in virtual time: the real sharing, the real scheduler and the real scripts, with faults."""
