"""The ways of an answer from its engine to the client: as it is, renamed, translated, collected, or as a tunnel."""
