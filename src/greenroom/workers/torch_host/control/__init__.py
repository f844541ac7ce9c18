"""The gateway's control connection, and the slots it opens, wakes, puts to sleep and closes."""
