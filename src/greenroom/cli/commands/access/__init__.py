"""Commands about keys and signed operations, and what was used with them."""
