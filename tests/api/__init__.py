"""Tests of `greenroom.api`."""
