"""Long work that callers and operators start: the moves they order, and the table of what outlives a request."""
