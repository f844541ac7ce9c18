"""Pipelines of diffusers: their files, the thread that makes pictures, and the API for images."""
