"""Requests to models, from the first byte to the last."""
