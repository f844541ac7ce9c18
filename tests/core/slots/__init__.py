"""What becomes of a slot: how long it stays, what operators order, what goes wrong, its versions."""
