"""Leases: claims on GPU memory that are written down, held by a slot or by any other program."""
