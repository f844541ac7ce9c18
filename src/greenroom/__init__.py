"""Greenroom: one OpenAI-compatible address in front of every model you own."""

__version__ = "0.1.0"
