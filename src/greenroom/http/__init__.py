"""HTTP/1.1 to clients and to engines, and the bytes between them."""
