"""Models and sounds that tests give to engines, made by code or fetched once."""
