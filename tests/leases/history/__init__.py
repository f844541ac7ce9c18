"""A history test: programs that lease memory while everything around them fails, and what they saw, checked."""
