"""The shell around the core: carries out its effects, watches what happens, and posts events back."""
