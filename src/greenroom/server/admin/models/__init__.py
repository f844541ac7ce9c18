"""Routes below `/v1/models` and the like: what there is, what is loaded, downloads, loads and versions."""
