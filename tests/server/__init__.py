"""Tests of `greenroom.server`."""
