"""Attention backends against plain sums."""
