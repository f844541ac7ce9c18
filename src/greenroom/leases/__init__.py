"""Claims on GPU memory that are written down, held by a slot or by any other program.

`client` runs inside the program that holds a lease. It needs the standard library alone, and `redis` for a Redis store.
"""
