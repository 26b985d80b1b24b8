"""Programs of the developer: generated code, its freshness, the README's commands, the training of the demo model."""
