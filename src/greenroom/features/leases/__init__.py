"""Leases as the gateway grants them: its own store, and its part in a shared one."""
