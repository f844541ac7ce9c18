"""What would happen: explanations, the queue, and simulations of other machines."""
