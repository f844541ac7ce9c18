"""Programs and servers that stand in for engines, workers, GPUs, hubs and providers, and misbehave on command."""
