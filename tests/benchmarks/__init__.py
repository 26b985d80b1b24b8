"""Tests of the measurements: they run."""
