"""Jobs: requests to models that are answered later, and their results as files."""
