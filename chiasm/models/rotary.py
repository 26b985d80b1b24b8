"""The rotary settings of a text decoder of the Qwen3 kind, wherever a `config.json` keeps them. No torch."""

from __future__ import annotations

from chiasm.models.reading import Reader


def read_mrope(section: Reader) -> tuple[float, tuple[int, int, int]]:
    """Rotary base and sections. transformers 4 keeps them in `rope_theta` and `rope_scaling`, transformers 5 in
    `rope_parameters`. A missing base is an error: reference implementations fall back to different numbers."""
    places = [section.section(key) for key in ("rope_parameters", "rope_scaling") if key in section]
    if not places:
        section.problem("rope_scaling", "is missing (looked for mrope_section there and in rope_parameters)")
        return 1.0, (1, 1, 1)
    thetas = {place.number("rope_theta") for place in (section, *places) if "rope_theta" in place}
    if len(thetas) != 1:
        found = f"is {' and '.join(map(str, sorted(thetas)))}" if thetas else "is missing"
        section.problem("rope_theta", f"{found} (looked in text_config, rope_parameters and rope_scaling)")
    rope = places[0]
    for key in ("rope_type", "type"):
        rope.refuse_unless(key, "default", "mrope", why="only the unscaled rotary embedding is done")
    rope.refuse_unless("partial_rotary_factor", 1, 1.0, why="the whole head is rotated")
    if rope.raw("mrope_interleaved") is not True:
        rope.problem("mrope_interleaved", f"is {rope.raw('mrope_interleaved')!r}: only interleaved mRoPE is supported")
    sizes = rope.integers("mrope_section")
    if len(sizes) != 3 or min(sizes, default=0) < 0 or max(sizes[1:], default=0) > sizes[0]:
        rope.problem("mrope_section", f"is {list(sizes)}, must be three counts, the first the largest")
        return 1.0, (1, 1, 1)
    return next(iter(thetas), 1.0), (sizes[0], sizes[1], sizes[2])
