"""What outlives a request: the table of operations, their files, and what is noted of them."""
