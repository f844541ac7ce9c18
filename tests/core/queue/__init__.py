"""What waits, and in which order."""
