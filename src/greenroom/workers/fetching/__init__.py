"""Fetches models from a hub: `main.py` is the program."""
