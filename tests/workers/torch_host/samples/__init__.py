"""Models, pipelines, tokenizers and chat templates that are made by code. Most of it needs torch."""
