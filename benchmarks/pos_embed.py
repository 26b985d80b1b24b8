"""What keeping the learned positions of a grid saves, against interpolating them for every frame anew.

One process, one thread, the released width and table. A: `GridPlaces` of 64 equal frames that it has seen, positions
and rotary tables, added to the patches of all of them. B: the same sums with nothing kept: corners and shares of all
patches of all frames computed at once, without a loop over frames, then four rows of the table gathered and summed for
each. Both are added to the same patches, which is most of what is left of A; `looked_up_us` is A without that. The
order is A B B A; medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks._alternate import alternate
from chiasm.layers.vit_places import Grid, GridPlaces, PositionEmbedding, VisionRope

SIDE, CHANNELS, MERGE, HEAD_DIM = 48, 1152, 2, 72
FRAMES = 64


def uncached(table: Tensor, grids: Tensor) -> Tensor:
    """(P, C) positions of (frames, 2) grids, all patches at once: the place of a patch in its own merge block, its row
    and column, four corners and their shares."""
    counts = grids.prod(1)
    frame = torch.repeat_interleave(torch.arange(len(grids)), counts)
    at = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    rows, columns = grids[frame].unbind(1)
    block, inner = at // MERGE**2, at % MERGE**2
    across = columns // MERGE
    where = torch.stack((block // across * MERGE + inner // MERGE, block % across * MERGE + inner % MERGE))
    last = torch.stack((rows, columns)) - 1
    point = where.float() * ((SIDE - 1) / last.clamp(min=1).float())
    low = point.long().clamp(max=SIDE - 1)
    high = (low + 1).clamp(max=SIDE - 1)
    part = point - low
    corners = [(y, x) for y in (0, 1) for x in (0, 1)]
    index = torch.stack([(high if y else low)[0] * SIDE + (high if x else low)[1] for y, x in corners])
    share = torch.stack([(part[0] if y else 1 - part[0]) * (part[1] if x else 1 - part[1]) for y, x in corners])
    four = table[index] * share.to(table.dtype).unsqueeze(-1)
    return four[0] + four[1] + four[2] + four[3]


@torch.inference_mode()
def measure(grid: Grid, rounds: int) -> dict[str, object]:
    cpu = torch.device("cpu")
    embedding = PositionEmbedding(SIDE, CHANNELS, MERGE, device=cpu, dtype=torch.bfloat16)
    embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    places = GridPlaces(embedding, VisionRope(HEAD_DIM, 1e4, MERGE, device=cpu))
    grids, shown = [grid] * FRAMES, torch.tensor([grid] * FRAMES)
    x_pc = torch.zeros(FRAMES * grid[0] * grid[1], CHANNELS, dtype=torch.bfloat16)
    expected = uncached(embedding.weight, shown)
    kept = places.of(grids).positions_pc.repeat(FRAMES, 1)
    apart = float((kept.float() - expected.float()).abs().max() / expected.float().abs().max())
    looked_up, made_anew = alternate(lambda: places.of(grids), lambda: uncached(embedding.weight, shown), 1)
    kept_added, made_added = alternate(
        lambda: x_pc.unflatten(0, (FRAMES, -1)) + places.of(grids).positions_pc,
        lambda: x_pc + uncached(embedding.weight, shown),
        rounds,
    )
    return {
        "ratio": round(made_added / kept_added, 1),
        "kept_ms": round(1e3 * kept_added, 2),
        "uncached_ms": round(1e3 * made_added, 2),
        "looked_up_us": round(1e6 * looked_up, 1),
        "made_anew_ms": round(1e3 * made_anew, 2),
        "apart": round(apart, 4),
        "grid": list(grid),
        "frames": FRAMES,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks pos_embed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure((18, 32), options.rounds)
    if not options.json:
        print(f"kept {result['kept_ms']} ms, made anew {result['uncached_ms']} ms")
    print(json.dumps(result))
