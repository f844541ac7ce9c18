"""Reads what other programs were configured with, and makes a configuration of it. Pure mapping; `cli` writes files."""
