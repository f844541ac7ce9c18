"""Orders of operators: load, unload, sleep, prepare, flush, reload, in our words and in those of llama-swap."""
