"""Reads the tensors in the safetensors files of a Hugging Face folder, one at a time.

An error about a file gives its name and a remedy; no problem is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sleuth.megatron.finite import not_finite

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
_HARMLESS_ENDINGS = (".rotary_emb.inv_freq",)
"""What files of some models hold besides weights, and every reader computes for itself."""
_ROWS_AT_ONCE = 4096
_OPEN_FILES = 2
"""Neighbouring tensors may lie in two files; more open ones would only keep their pages in memory."""


class HfWeights:
    """The tensors of a Hugging Face folder, read one at a time.

    They are in the files that the index lists, or in model.safetensors if there is no index; other files are ignored.
    Raises ValueError if a file is missing, damaged, or of another format, or if two files hold a tensor of one name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._owner: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, list[int]] = {}
        listed = _listed_files(folder)
        for path in dict.fromkeys(listed.values()) if listed else [folder / SINGLE_FILE]:
            self._take_names(path)
        for name, path in listed.items():
            if self._owner.get(name) != path:
                raise ValueError(
                    f"{folder / INDEX_FILE} says that {path.name} holds {name}, which is not there; "
                    "download index and files again, from one source"
                )

    @property
    def names(self) -> list[str]:
        """The names of all tensors, except for those that are known to be harmless extras."""
        return [name for name in self._owner if not name.endswith(_HARMLESS_ENDINGS)]

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. ValueError if no file holds it, it cannot be a weight, or it is not finite."""
        problems = [*self._missing([name]), *self._no_weights([name])]
        if problems:
            raise self._refusal(problems)
        tensor: Tensor = self._handle(self._owner[name]).get_tensor(name)
        if not_finite([(name, tensor)]):
            raise self._refusal([f"{name} in {self._owner[name].name} holds NaN or infinite values; download it again"])
        return tensor

    def describe(self, name: str) -> Tensor:
        """A tensor of the same shape without values, on the meta device."""
        return torch.empty(self._shapes[name], device="meta")

    def check(self, expected: Sequence[str], num_layers: int, tied_head: tuple[str, str] | None) -> None:
        """Raise ValueError unless the files hold the `expected` tensors of a model, and nothing else.

        `tied_head` names an output layer and the embedding: the files may hold that output layer if it
        equals the embedding.
        """
        allowed = {*expected, *(tied_head or ())}
        problems = [
            *self._no_weights(self.names),
            *self._left_over([name for name in self.names if name not in allowed], num_layers),
            *self._missing(expected),
        ]
        if not problems and tied_head and tied_head[0] in self._owner:
            problems += self._untied(*tied_head)
        if problems:
            raise self._refusal(problems)

    def _refusal(self, problems: Sequence[str]) -> ValueError:
        return ValueError(f"the weights in {self.folder} cannot be used\n  " + "\n  ".join(problems))

    def _take_names(self, path: Path) -> None:
        handle = self._handle(path)
        for name in handle.keys():  # noqa: SIM118
            if name in self._owner:
                raise ValueError(
                    f"{self._owner[name]} and {path} both hold {name}; remove the file that is not of this model, or "
                    "download the model again"
                )
            self._owner[name] = path
            described = handle.get_slice(name)
            self._dtypes[name], self._shapes[name] = described.get_dtype(), described.get_shape()

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            while len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open)))
            self._open[path] = _open_safetensors(path)
        return self._open[path]

    def _missing(self, expected: Sequence[str]) -> Iterator[str]:
        missing = [name for name in expected if name not in self._owner]
        if missing:
            yield (
                f"expected tensor {_listed(missing)}, as config.json has it, found {len(self._owner)} others; "
                "config.json and weights must be of the same model"
            )

    def _no_weights(self, names: Sequence[str]) -> Iterator[str]:
        wrong = [name for name in names if self._dtypes.get(name, "F32") not in _WEIGHT_DTYPES]
        if wrong:
            kinds = ", ".join(sorted({self._dtypes[name] for name in wrong}))
            yield (
                f"expected float32, float16 or bfloat16, found {kinds} in {_listed(wrong)}; a quantised model cannot "
                "be trained: take the one it was made from"
            )

    def _left_over(self, names: list[str], num_layers: int) -> Iterator[str]:
        deeper = [name for name in names if (layer := _layer_of(name)) is not None and layer >= num_layers]
        if deeper:
            found = 1 + max(layer for name in deeper if (layer := _layer_of(name)) is not None)
            yield (
                f"config.json says {num_layers} layers, the files hold {found}: {_listed(deeper)} would be left out; "
                "correct num_hidden_layers, or take the files of this model"
            )
        rest = [name for name in names if name not in set(deeper)]
        if rest:
            yield (
                f"{_listed(rest)} has no place in the model that config.json describes; config.json and weights must "
                "be of the same model"
            )

    def _untied(self, head: str, embedding: str) -> Iterator[str]:
        ours, theirs = (self._handle(self._owner[name]).get_slice(name) for name in (head, embedding))
        starts = range(0, self._shapes[head][0], _ROWS_AT_ONCE)
        if self._shapes[head] != self._shapes[embedding] or not all(
            torch.equal(ours[start : start + _ROWS_AT_ONCE], theirs[start : start + _ROWS_AT_ONCE]) for start in starts
        ):
            yield (
                f"config.json says that {head} is {embedding} (tie_word_embeddings), the files hold another one; set "
                "tie_word_embeddings to false if the model was trained so, or remove the tensor"
            )


def _listed_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor by the index; {} if there is only model.safetensors. ValueError if there is neither."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index} is not an index of tensors ({_cause(index) or error!r}); download it again"
            ) from error
        if not places:
            raise ValueError(f"{index} lists no tensors; download it again")
        for name, file in places.items():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise ValueError(f"{index} says that {file!r} holds {name}, expected a file's name; download it again")
        return {name: folder / file for name, file in places.items()}
    if not (folder / SINGLE_FILE).is_file():
        raise ValueError(_without_safetensors(folder))
    return {}


def _without_safetensors(folder: Path) -> str:
    """What to do with a folder that has neither an index nor model.safetensors."""
    expected = f"expected {SINGLE_FILE} or {INDEX_FILE} in {folder}, found "
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return (
            f"{expected}{_listed(others)} without an index; download the index, or rename the file if it holds the "
            f"whole model to {SINGLE_FILE}"
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return (
            f'{expected}{_listed(pickles)}; write safetensors with `python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\"`"
        )
    return f"{expected}no weights; download the model again"


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # here: the trainer itself can do without this package

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        if not path.is_file():
            raise ValueError(
                f"{path.parent / INDEX_FILE} names {path.name}, which is not there; download it"
            ) from error
        raise ValueError(f"{path} {_cause(path) or f'cannot be read ({error})'}; download it again") from error


def _cause(path: Path) -> str:
    """A guess, from its size and first bytes, at what is wrong with a file that cannot be parsed."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file (`git lfs pull` fetches it)"
    return "is cut short or damaged" if path.suffix == ".safetensors" else ""


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and "".join(parts[2:3]).isdecimal() else None


def _listed(names: Sequence[str]) -> str:
    """At most four names, and the number of further ones."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
