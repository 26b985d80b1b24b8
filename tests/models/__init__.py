"""Families: their configurations, their weights, their halves."""
