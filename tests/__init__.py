"""The tests mirror the tree. `tests.oracles` holds what they compare with."""
