"""What is generated from the schema: the example file, the JSON schema, the reference tables."""
