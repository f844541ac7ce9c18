"""Worker processes that host slots, and the control connection to each."""
