"""What an operator can say: the options of each section of the configuration, and the rules between them. Their
annotations are no strings (`from __future__ import annotations`): pydantic would compile each one at the start."""
