"""Between tokens and what people read: templates, stop sequences, tool calls, channels."""
