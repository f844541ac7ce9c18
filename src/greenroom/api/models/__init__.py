"""Models as the management API lists and describes them."""
