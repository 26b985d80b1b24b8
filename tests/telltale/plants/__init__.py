"""Bugs that are planted into running services, each by its name: the validator must find every one."""

from __future__ import annotations

from collections.abc import Mapping

from tests.telltale.plants import answering, crossing, drawing, encoding, pooling, routing
from tests.telltale.plants.planting import Plant, Planted, planted

__all__ = ["PLANTS", "Plant", "Planted", "planted"]

PLANTS: Mapping[str, Plant] = {
    plant.name: plant
    for module in (encoding, crossing, pooling, drawing, answering, routing)
    for plant in module.GARDEN.plants
}
"""All of them, by name."""
