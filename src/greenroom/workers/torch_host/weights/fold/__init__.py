"""Folded weights: two-byte floats kept in one and a half bytes, bit for bit."""
