"""What a name means that callers ask for: tasks and their candidates. Pure; imports configuration and core alone."""
