"""What worker programs serve their models with: HTTP on a Unix socket, fields of a body, and OpenAI's shape of errors.
Standard library and h11 only: workers run under other Pythons than the gateway."""
