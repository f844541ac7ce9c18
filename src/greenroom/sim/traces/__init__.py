"""Recorded traffic: files of several formats, and what they tell of the speed of models."""
