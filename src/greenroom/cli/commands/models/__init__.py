"""Commands about models: what is on disk and what it needs, and conversations and jobs with them."""
