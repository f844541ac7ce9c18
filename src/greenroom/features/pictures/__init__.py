"""Pictures that are answered by URL and kept for a while."""
