"""The pure core: rules, random runs, faults and replay. No clock but the world's own, so nothing here sleeps."""
