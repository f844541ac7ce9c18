"""Order and victims, by policy and swapper."""
