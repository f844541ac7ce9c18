"""Weights: read from files into the host arena, and from there to the device."""
