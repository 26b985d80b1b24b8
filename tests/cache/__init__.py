"""Entries and the stores that keep them."""
