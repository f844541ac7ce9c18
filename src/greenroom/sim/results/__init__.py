"""What a run shows: figures, the verdict in words, and the report as a page."""
