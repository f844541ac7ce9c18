"""Decides what should happen. Pure: no asyncio, clock, I/O, logging or randomness; the standard library only."""
