"""Foreign code (chat templates, JSON schemas) run where it may fail or be killed."""
