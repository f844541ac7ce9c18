"""Leases for programs that are not models: `with greenroom.lease(mib=20_000) as held: …`.

Owns what runs inside the program that holds a lease. Made of the standard library alone (and `redis` where the store is
one), so that it can be used beside any version of anything.
"""

from greenroom.leasing_client.handle import LeaseHandle, lease

__all__ = ["LeaseHandle", "lease"]
