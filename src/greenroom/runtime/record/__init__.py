"""What is written to disk: recordings, learned times, and the files they are in."""
