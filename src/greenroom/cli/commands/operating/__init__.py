"""Commands for a gateway that runs: what it does, why, and orders to change that."""
