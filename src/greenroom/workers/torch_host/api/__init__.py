"""The OpenAI API of one hosted model on its Unix socket."""
