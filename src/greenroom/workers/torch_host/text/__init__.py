"""Between tokens and text: chat templates, stop sequences, tool calls, channels."""
