"""What an operator can say: the options of each section of the configuration, and the rules between them."""
