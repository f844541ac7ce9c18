"""What waits: requests, operator loads, preloads and leases, in the order a policy gives them."""
