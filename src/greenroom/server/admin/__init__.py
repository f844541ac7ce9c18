"""The management API: status, orders, leases, metrics. An ASGI application."""
