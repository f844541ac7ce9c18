"""Parts of the wiring, one file each: what belongs together is made together. Only `app.py` calls them."""
