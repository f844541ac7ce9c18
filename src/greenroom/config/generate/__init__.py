"""What is written from the schema: the example file, the JSON schema and the reference in the docs."""
