"""Who may ask for what, and how much: keys, tenants, profiles, limits, and what was used."""
