"""Tests of the developer's programs: `tools`."""
