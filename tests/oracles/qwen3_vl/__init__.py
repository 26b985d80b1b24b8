"""What Qwen3-VL's own processor made of 44 prompts: text, ids, pixels, grids and positions, recorded.

`data/` is a recording of transformers 5.24.0 on an x86-64 CPU with torchvision 0.28.0 (torch 2.13.0); `fixtures.json`
names the other versions. Beside it lies the checkpoint folder it was made with, weights left out: a tokenizer of 1,024
ids, trained for it, and small budgets.
"""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
"""`fixtures.json`, `fixtures.safetensors`, and the checkpoint folder's files."""
