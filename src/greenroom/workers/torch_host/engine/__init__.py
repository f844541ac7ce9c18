"""The inference engine: requests, sequences, KV blocks, the batch scheduler, the model runner, sampling."""
