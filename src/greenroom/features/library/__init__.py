"""Models on disk as users see them: listed, fetched, deleted, in our words and in those of Ollama."""
