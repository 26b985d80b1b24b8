"""Layers against stock implementations."""
