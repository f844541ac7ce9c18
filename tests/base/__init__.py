"""Tests of `greenroom.base`."""
