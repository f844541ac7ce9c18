"""An example engine for Greenroom: it repeats what it is told."""
