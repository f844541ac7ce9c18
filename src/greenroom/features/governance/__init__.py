"""Signed operations: tokens, the keys that prove them, used nonces, and the audit log."""
