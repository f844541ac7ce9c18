"""Faster ways to compute the same: attention, rotary embedding, fused modules, captured graphs."""
