"""Trains the `digits` checkpoint that comes with the package: `python -m tools.train_digits`.

A MOSS-VL small enough for any CPU, whose answers are right or wrong: it reads handwritten digits from videos, images
and a growing timeline. It learns through the layers, the prompt and the timeline that serve it, so what it learned is
what is run.
"""
