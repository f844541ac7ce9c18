"""Runs foreign code (chat templates, JSON schemas) where it may fail or be killed."""
