"""Rules about which models may be ready together."""
