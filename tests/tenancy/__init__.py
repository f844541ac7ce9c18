"""Tests of `greenroom.tenancy`."""
