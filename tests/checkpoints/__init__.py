"""Tests of the checkpoints that come with the package."""
