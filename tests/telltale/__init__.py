"""The tell-tale laboratory: real services around a model whose tokens tell what was computed from what, the history of
what clients saw of them, a validator that finds the truth of a history in its requests alone, and the bugs that the
validator is tested with."""
