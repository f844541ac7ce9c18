"""What users order beside answers of models: a folder for each, with its routes and commands."""
