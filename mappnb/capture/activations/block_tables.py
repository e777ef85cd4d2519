"""The sample table of one stream in a block that is being written: which rows a microbatch has, and the tables of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mappnb.activation_blocks import SAMPLE_COLUMNS, Stored
from mappnb.capture.activations.pieces import TokensOf

__all__ = ["StreamTable"]

_Array = np.ndarray[Any, Any]
_TOKEN_TABLES = (
    ("token_id", "ids", np.int64, -1),
    ("position", "positions", np.int32, -1),
    ("mask", "mask", np.bool_, False),
)


class StreamTable:
    """Rows of one stream: each microbatch begins at a multiple of the first one's samples, where its chunks begin.

    Attributes
    ----------
    batch : int
        Samples of a chunk.
    """

    def __init__(self, batch: int) -> None:
        self.batch = max(batch, 1)
        self.num_rows = 0
        self._first: dict[tuple[int, int, int], int] = {}
        self._tokens: dict[tuple[int, int, int], list[TokensOf]] = {}

    def row_of(self, tokens: TokensOf) -> int:
        """Return the first row of a microbatch; chunks of the model share it."""
        first = self._first.get(tokens.key)
        if first is None:
            first = self._first[tokens.key] = -(-self.num_rows // self.batch) * self.batch
            self.num_rows = first + tokens.batch
        seen = self._tokens.setdefault(tokens.key, [])
        if not any(tokens is t for t in seen):
            seen.append(tokens)
        return first

    @property
    def steps(self) -> set[int]:
        """Steps that have rows."""
        return {key[0] for key in self._first}

    def arrays(self) -> Iterator[tuple[str, Stored]]:
        """Give the tables to be stored."""
        columns = np.full((4, self.num_rows), -1, np.int64)
        prompts = np.full(self.num_rows, "", object)
        for key, first in self._first.items():
            batch = self._tokens[key][0].batch
            columns[:3, first : first + batch] = np.array(key)[:, None]
            columns[3, first : first + batch] = np.arange(batch)
            for tokens in self._tokens[key]:
                if tokens.prompts is not None:
                    prompts[first : first + batch] = list(tokens.prompts)
        for name, column in zip(SAMPLE_COLUMNS, columns, strict=True):
            yield name, Stored(column, ("sample",))
        if any(prompts):
            texts, numbers = np.unique(prompts.astype(str), return_inverse=True)
            yield "prompt", Stored(numbers.astype(np.int64), ("sample",), {"texts": texts.tolist()})
        yield from self._slot_tables()
        yield from self._token_tables()

    def _slot_tables(self) -> Iterator[tuple[str, Stored]]:
        for name, attribute, dim in (("token_index", "slots", "token"), ("token_index_sp", "slots_sp", "token_sp")):
            rows = {
                key: np.broadcast_to(slots, (self._tokens[key][0].batch, len(slots)))
                for key, slots in self._known(attribute)
            }
            if rows:
                yield name, Stored(self._table(rows, np.int32, -1), ("sample", dim))

    def _token_tables(self) -> Iterator[tuple[str, Stored]]:
        for name, attribute, dtype, missing in _TOKEN_TABLES:
            rows = {key: pending.array() for key, pending in self._known(attribute)}
            if rows:
                yield name, Stored(self._table(rows, dtype, missing), ("sample", "token"))

    def _known(self, attribute: str) -> Iterator[tuple[tuple[int, int, int], Any]]:
        """Give what the first chunk of the model that knows an attribute of `TokensOf` tells of each microbatch."""
        for key, those in self._tokens.items():
            found = next((value for t in those if (value := getattr(t, attribute)) is not None), None)
            if found is not None:
                yield key, found

    def _table(self, rows: dict[tuple[int, int, int], _Array], dtype: Any, missing: Any) -> _Array:
        out = np.full((self.num_rows, max(v.shape[1] for v in rows.values())), missing, dtype)
        for key, values in rows.items():
            first = self._first[key]
            out[first : first + len(values), : values.shape[1]] = values
        return out
