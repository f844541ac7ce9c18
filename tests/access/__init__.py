"""Tests of `greenroom.access`."""
