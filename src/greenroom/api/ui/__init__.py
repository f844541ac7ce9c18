"""The dashboard's files and how they are served."""
