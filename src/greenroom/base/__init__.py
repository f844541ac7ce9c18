"""Leaves that every part may import. They import nothing of ours but the errors."""
