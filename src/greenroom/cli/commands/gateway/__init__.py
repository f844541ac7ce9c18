"""Commands about a gateway as a whole: run it, check its configuration, simulate it."""
