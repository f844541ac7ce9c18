"""Models that run elsewhere: what they cost, and their names."""
