"""Moves carried out: loads, wakes, sleeps and unloads, each ending in one `MoveDone`."""
