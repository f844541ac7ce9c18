"""The inference engine: sequences, KV blocks, the batch scheduler, the runner, sampling."""
