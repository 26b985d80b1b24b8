"""Chaos: whole systems of processes that are hurt every second while clients ask, with the digits as judge."""
