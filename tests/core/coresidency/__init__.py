"""Rules about who may be on stage together."""
