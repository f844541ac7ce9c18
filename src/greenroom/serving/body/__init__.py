"""The body of a request: what the gateway reads of it, and what it passes on unread."""
