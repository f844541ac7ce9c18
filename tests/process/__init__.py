"""Real processes, real signals: every test here looks at /proc for what is left."""
