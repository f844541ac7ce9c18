"""One file for each command of `greenroom`."""
