"""What runs are judged by: figures, goals, and what is printed of them."""
