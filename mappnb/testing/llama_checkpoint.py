"""Tensors of a Llama by the names of Hugging Face: of a folder with safetensors, read when asked for, or of a model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mappnb.testing.llama_shape import CheckpointError, LlamaShape

__all__ = ["CheckpointError", "LlamaCheckpoint"]


@dataclass(frozen=True, slots=True)
class LlamaCheckpoint:
    """Named tensors of a Llama.

    Attributes
    ----------
    shape : LlamaShape
        From its configuration.
    where : str
        Named in errors.
    """

    shape: LlamaShape
    where: str
    _sizes: Mapping[str, tuple[int, ...]]
    _read: Callable[[str], Any]

    @classmethod
    def of(cls, source: Any) -> LlamaCheckpoint:
        """Return the checkpoint of a folder (str or Path) or of a ``LlamaForCausalLM``."""
        return cls.open(source) if isinstance(source, str | Path) else cls.of_model(source)

    @classmethod
    def of_model(cls, model: Any) -> LlamaCheckpoint:
        """Return the checkpoint of a ``LlamaForCausalLM``, whose tensors are not copied."""
        state = model.state_dict()
        where = type(model).__name__
        sizes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return cls(LlamaShape.of_config(model.config.to_dict(), where=where), where, sizes, state.__getitem__)

    @classmethod
    def open(cls, folder: str | Path) -> LlamaCheckpoint:
        """Open a folder as ``save_pretrained`` writes it; tensors are read when asked for.

        Parameters
        ----------
        folder : path
            With ``config.json`` and ``*.safetensors``.

        Raises
        ------
        CheckpointError
            If there are none.
        """
        from safetensors import safe_open

        path = Path(folder)
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path}: no config.json; expected a folder of a Llama, as save_pretrained() writes it"
            )
        config = json.loads((path / "config.json").read_text())
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: no *.safetensors; save the model with save_pretrained(folder)")
        sizes: dict[str, tuple[int, ...]] = {}
        where: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    sizes[name], where[name] = tuple(opened.get_slice(name).get_shape()), file

        def read(name: str) -> Any:
            with safe_open(where[name], framework="pt") as opened:
                return opened.get_tensor(name)

        return cls(LlamaShape.of_config(config, where=str(path / "config.json")), str(path), sizes, read)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor; nothing is read."""
        return self._sizes

    def tensor(self, name: str) -> Any:
        """Return one tensor."""
        return self._read(name)
