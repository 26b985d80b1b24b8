"""A checkpoint directory in Hugging Face layout: its JSON files, its tensors, its identity.

`config.json`, `model.safetensors` or an index with shards, `tokenizer.json` and a chat template where there are any.
Code in a checkpoint is never run: `auto_map` is not looked at. What the numbers mean is the family's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import blake3
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from chiasm.errors import CheckpointError
from chiasm.models.reading import read_json, shown

_PROCESSOR_FILES = {"preprocessor_config.json": "image_processor", "video_preprocessor_config.json": "video_processor"}
_PROCESSOR_FILE = "processor_config.json"
"""transformers 5 writes both into this one, under these keys, and reads what is in it first."""

_FINGERPRINT_FILE = "chiasm.json"
_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
"""Bytes of a number by safetensors' name of its type; the others have one."""


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, read from disk one at a time.

    Attributes:
        on_read: told the bytes of every tensor that was read, by whoever wants to know how far a loading is.

    Raises CheckpointError for a shard that is absent or broken, or that lacks a tensor the index promises.
    """

    def __init__(self, directory: Path) -> None:
        self.where = directory.name
        self.on_read: Callable[[int], object] | None = None
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if index.exists():
            promised = read_json(index).get("weight_map")
            if not isinstance(promised, dict):
                raise CheckpointError(self.where, [f"{index.name} has no weight_map"])
            unplaced = sorted(name for name, place in promised.items() if not isinstance(place, str))
            if unplaced:
                raise CheckpointError(self.where, [f"{index.name} names no file for {name}" for name in unplaced])
        elif single.exists():
            promised = None
        else:
            raise CheckpointError(self.where, [f"neither {single.name} nor {index.name} is there"])
        self._files: dict[str, Path] = {}  # by tensor name
        self._mapped: dict[Path, safe_open] = {}  # what was read of them counts as memory of this process
        problems = []
        for file in sorted(set(promised.values())) if promised is not None else [single.name]:
            if file in ("", "..") or Path(file).name != file:
                problems.append(f"{index.name} names a file outside the folder")
                continue
            if not file.isprintable() or len(file) > 255:
                problems.append(f"{index.name} names {shown(file)}, which no file is called")
                continue
            try:
                shard = safe_open(directory / file, framework="pt")
                held = set(shard.keys())
            except (OSError, SafetensorError) as error:
                problems.append(f"{file} cannot be read ({type(error).__name__})")
                continue
            wanted = held if promised is None else {name for name, place in promised.items() if place == file}
            problems += [f"{file} lacks {name}, which {index.name} promises" for name in sorted(wanted - held)]
            problems += [f"{file} holds {name}, which {index.name} does not list" for name in sorted(held - wanted)]
            self._files |= dict.fromkeys(held, directory / file)
            self._mapped[directory / file] = shard
        if problems:
            raise CheckpointError(self.where, problems)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._shard(name).get_tensor(name)
        if self.on_read is not None:
            self.on_read(tensor.nbytes)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files  # the base class would read the tensor to find out

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """safetensors type name and shape, without reading the data."""
        part = self._shard(name).get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of the tensors that are there among `names`, or of all, without reading the data."""
        counted = self._files if names is None else [name for name in names if name in self._files]
        described = (self.describe(name) for name in counted)
        return sum(math.prod(shape) * _WIDTHS.get(dtype, 1) for dtype, shape in described)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def unmap(self) -> None:
        """Lets go of the files. They are opened anew when something more is read."""
        self._mapped.clear()

    def _shard(self, name: str) -> safe_open:
        path = self._files[name]
        if path not in self._mapped:
            self._mapped[path] = safe_open(path, framework="pt")
        return self._mapped[path]


class Checkpoint:
    """One directory, opened. Raises CheckpointError if it is none."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise CheckpointError(directory.name, ["is not a folder"])
        self.directory = directory
        self.where = directory.name
        self.config = read_json(directory / "config.json")

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(self.directory)

    @property
    def architecture(self) -> str:
        """The one architecture config.json names."""
        named = self.config.get("architectures")
        if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
            raise CheckpointError(self.where, [f"architectures is {shown(named)}, must name one"])
        return named[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type the checkpoint says it is stored in: `dtype`, or `torch_dtype` in older files. Where the whole says
        nothing, `text_config` does: so it is in Qwen3-VL as released."""
        text = self.config.get("text_config")
        places = (self.config, text if isinstance(text, dict) else {})
        name = next((said for place in places if (said := place.get("dtype") or place.get("torch_dtype"))), None)
        if not isinstance(name, str) or name not in _TYPES:
            raise CheckpointError(self.where, [f"dtype is {shown(name)}, must be one of {', '.join(_TYPES)}"])
        return _TYPES[name]

    @property
    def processor_files(self) -> dict[str, dict[str, object]]:
        """What the preprocessing files say, by name, wherever a release of transformers wrote it."""
        path = self.directory / _PROCESSOR_FILE
        whole = read_json(path) if path.exists() else {}
        found = {}
        for name, key in _PROCESSOR_FILES.items():
            inside = whole.get(key)
            if isinstance(inside, dict):
                found[name] = inside
            elif inside is not None:
                raise CheckpointError(self.where, [f"{key} in {_PROCESSOR_FILE} is {shown(inside)}, no object"])
            elif (self.directory / name).exists():
                found[name] = read_json(self.directory / name)
        return found

    @property
    def tokenizer_file(self) -> Path | None:
        path = self.directory / "tokenizer.json"
        return path if path.exists() else None

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own template: `chat_template.jinja`, or inside chat_template.json, where older processors
        wrote it, or inside tokenizer_config.json: the first that is there, as `transformers` has it."""
        path = self.directory / "chat_template.jinja"
        if path.exists():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(self.where, [f"{path.name} cannot be read ({type(error).__name__})"]) from None
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = self.directory / name
            template = read_json(path).get("chat_template") if path.exists() else None
            if isinstance(template, str):
                return template
            if template is not None:
                raise CheckpointError(self.where, [f"chat_template in {name} is no single template"])
        return None

    @property
    def fingerprint_known(self) -> bool:
        """Whether `fingerprint` is told without reading every tensor."""
        return "fingerprint" in self.__dict__ or (self.directory / _FINGERPRINT_FILE).exists()

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits that name these weights with this configuration.

        The digest of every tensor and of config.json; or, for a folder that holds one half only, what was written
        beside it when it was cut from the whole (`split`), so that halves of one checkpoint know each other.
        """
        path = self.directory / _FINGERPRINT_FILE
        if path.exists():
            written = read_json(path).get("fingerprint")
            if not isinstance(written, str) or len(written) != 64:
                raise CheckpointError(self.where, [f"{_FINGERPRINT_FILE} holds no fingerprint"])
            return written
        digest = blake3.blake3(b"chiasm checkpoint v1\0", max_threads=blake3.blake3.AUTO)
        _feed(digest, json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            dtype, shape = self.tensors.describe(name)
            _feed(digest, json.dumps([name, dtype, shape]).encode())
            tensor = self.tensors[name].contiguous()
            _feed(digest, tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @cached_property
    def text_fingerprint(self) -> bytes:
        """32 bytes that name what text it makes of a prompt: the weights and their configuration, the tokenizer and the
        template. An answer that was begun with one is gone on with by the same only."""
        digest = blake3.blake3(b"chiasm text v1\0")
        _feed(digest, self.fingerprint.encode())
        _feed(digest, b"" if self.tokenizer_file is None else self.tokenizer_file.read_bytes())
        _feed(digest, (self.chat_template or "").encode())
        return digest.digest()


def _feed(digest: blake3.blake3, data: bytes | memoryview) -> None:
    """Length first, so that no two sequences of pieces read the same."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def split(checkpoint: Checkpoint, names: set[str], target: Path) -> None:
    """Writes a folder that holds only the tensors `names` of a checkpoint, with its JSON files and its fingerprint.

    Made for halves: the encoder's folder holds no language model and the decoder's no vision transformer.
    """
    target.mkdir(parents=True)
    save_file(
        {name: checkpoint.tensors[name] for name in names if name in checkpoint.tensors}, target / "model.safetensors"
    )
    for path in checkpoint.directory.iterdir():
        if path.suffix in {".json", ".jinja", ".txt"} and not path.name.endswith(".index.json"):
            (target / path.name).write_bytes(path.read_bytes())
    (target / _FINGERPRINT_FILE).write_text(json.dumps({"fingerprint": checkpoint.fingerprint}), encoding="utf-8")
