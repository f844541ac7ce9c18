"""Commands about a gateway as a whole: run it, check or reload its configuration, simulate it."""
