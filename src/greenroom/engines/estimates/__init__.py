"""What a model will need before it was ever measured, read from file headers and command lines."""
