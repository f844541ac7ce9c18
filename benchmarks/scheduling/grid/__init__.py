"""What is played: machines, traffic, and the cells that are made of both; and how many of them are run."""
