"""Bugs that are planted into running services, each by its name: the validator must find every one."""

from __future__ import annotations

from collections.abc import Mapping

from tests.telltale.plants import answering, crossing, drawing, encoding, pooling, resuming, routing
from tests.telltale.plants.planting import Plant, Planted, planted

__all__ = ["PLANTS", "Plant", "Planted", "planted"]

PLANTS: Mapping[str, Plant] = {
    plant.name: plant
    for garden in (
        *(module.GARDEN for module in (encoding, crossing, pooling, drawing, answering, routing)),
        *(resuming.DECODER, resuming.ROUTER, resuming.CLIENT),
    )
    for plant in garden.plants
}
"""All of them, by name."""
