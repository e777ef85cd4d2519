"""The names inside a run directory, spelled once, and the check of its format version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mappnb.errors import FormatVersionError, NotARunError
from mappnb.schema import FORMAT_VERSION

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "INC",
    "INCARNATION",
    "INC_NAME",
    "RANK",
    "RANKS",
    "RANK_NAME",
    "RUN",
    "SEGMENT",
    "check_version",
]

RUN, INCARNATION, RANKS, ACTIVATIONS = "run.json", "incarnation.json", "ranks", "activations"
INC_NAME, RANK_NAME = "inc={:03d}", "rank={:05d}"
INC = re.compile(r"inc=(\d+)$")
RANK = re.compile(r"rank=(\d+)(?:\.json)?$")
BLOCK = re.compile(r"block-(\d+)\.zarr\.zip$")
SEGMENT = re.compile(r"(seg|open)-(\d+)\.(?:parquet|arrows)$")


def check_version(info: Mapping[str, Any], where: str) -> None:
    """Raise unless this mappnb can read a run: FormatVersionError for a newer format, NotARunError for none at all."""
    version = info.get("format_version")
    if not isinstance(version, int):
        raise NotARunError(f"{where}: run.json has no format_version; the file was not written by mappnb")
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: written in format {version}, this mappnb reads formats up to {FORMAT_VERSION}; "
            f"upgrade with 'pip install -U mappnb'"
        )
