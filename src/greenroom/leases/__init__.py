"""Leases: claims on GPU memory, held by a slot or by any other program. `client` runs inside the program that holds a
lease. It needs only the standard library, and `redis` for a Redis store."""
