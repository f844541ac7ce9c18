"""Tests of the HTTP edge, the connections to engines and the relay between them."""
