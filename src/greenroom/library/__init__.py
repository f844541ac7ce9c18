"""What models are on disk: below the roots, in plain folders and in the layout of the hub's cache."""
