"""Recorded results of reference implementations, and the commands that compare this project with them."""
