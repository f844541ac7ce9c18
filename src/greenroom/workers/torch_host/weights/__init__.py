"""Weights: read from files into a host arena, copied to the device at wake, kept folded where that is smaller."""
