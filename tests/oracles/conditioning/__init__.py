"""States after layers of a Qwen3-VL, whole and cut, held against those of transformers, taken through hooks."""
