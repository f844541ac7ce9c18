"""Whole runs of the core: random, replayed, with one fault, with very many models."""
