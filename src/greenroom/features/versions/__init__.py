"""Which weights a name serves: numbered versions, updates without a gap, and a file of the desired state."""
