"""From state to a plan: where a model could go, which residents would leave, what happens to a waiter now. Pure."""
