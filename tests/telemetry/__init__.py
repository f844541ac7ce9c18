"""Tests of `greenroom.telemetry`."""
