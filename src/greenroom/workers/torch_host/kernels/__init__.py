"""Faster ways to compute the same: attention, rope, fused modules, captured graphs."""
