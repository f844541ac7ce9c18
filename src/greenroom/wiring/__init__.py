"""The wiring of a gateway, one file for each group of objects. Only `app.py` calls it."""
