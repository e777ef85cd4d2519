"""Compute time as a function of the lengths of documents, fitted so that single odd microbatches do not count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

__all__ = ["Fit", "fit_lengths"]

Array = np.ndarray[Any, Any]

HUBER: Final = 1.345
"""Residuals above this many standard deviations count less: 95 % efficiency on normal ones (Huber 1964)."""
MAD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
VARIES: Final = 1e-3
"""A sum that varies less than this (its standard deviation over its mean) tells nothing: as packed sequences, all equally long."""
_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Fit:
    """``seconds = fixed_s + per_token_s * tokens + per_square_s * squares``.

    Attributes
    ----------
    fixed_s, per_token_s, per_square_s : float
        Coefficients; one that cannot be told is 0, and in ``fixed_s``.
    explained : float
        Share of the variance.
    excess_explained : float
        Of the time above the mean, summed over the microbatches above it, the part that the fit gives.
    residual_s : float
        Typical residual: its scaled median absolute value.
    count : int
        Microbatches.
    """

    fixed_s: float
    per_token_s: float
    per_square_s: float
    explained: float
    excess_explained: float
    residual_s: float
    count: int

    def predict(self, tokens: Array, squares: Array) -> Array:
        """Return seconds."""
        return np.asarray(self.fixed_s + self.per_token_s * tokens + self.per_square_s * squares)

    def movable(self, tokens: float) -> Fit:
        """Return the fit by which documents are moved: where all microbatches had ``tokens``, what is fixed goes with the tokens."""
        if self.per_token_s:
            return self
        return replace(self, fixed_s=0.0, per_token_s=self.fixed_s / tokens if tokens else 0.0)


def fit_lengths(seconds: Array, tokens: Array, squares: Array) -> Fit:
    """Return the fit of compute times, by iteratively reweighted least squares (Huber's weights).

    Parameters
    ----------
    seconds, tokens, squares : array, dims (microbatch,)
        Compute time in s, sum of lengths, sum of squared lengths.
    """
    columns = [np.ones(len(seconds))]
    used = []
    for values in (tokens, squares):
        if len(values) > 2 and values.std() > VARIES * abs(values.mean()):
            columns.append(values / values.mean())
            used.append(values.mean())
        else:
            used.append(np.nan)
    design = np.stack(columns, 1)
    weight, scale = np.ones(len(seconds)), 0.0
    solution = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)
        solution = np.linalg.lstsq(design * root[:, None], seconds * root, rcond=1e-9)[0]
        residual = seconds - design @ solution
        scale = MAD * float(np.median(np.abs(residual)))
        if scale <= 1e-12 * abs(float(seconds.mean())):
            break
        weight = np.minimum(1, HUBER * scale / np.maximum(np.abs(residual), 1e-300))
    found = iter(solution[1:].tolist())
    per = [0.0 if np.isnan(mean) else next(found) / float(mean) for mean in used]
    return _told(Fit(float(solution[0]), per[0], per[1], 0, 0, scale, len(seconds)), seconds, tokens, squares)


def _told(fit: Fit, seconds: Array, tokens: Array, squares: Array) -> Fit:
    told = fit.predict(tokens, squares)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    explained = 1 - float(((seconds - told) ** 2).sum()) / spread if spread > 0 else np.nan
    above = seconds > seconds.mean()
    excess = float((seconds - seconds.mean())[above].sum())
    share = float((told - seconds.mean())[above].sum()) / excess if excess > 0 else np.nan
    return Fit(fit.fixed_s, fit.per_token_s, fit.per_square_s, explained, share, fit.residual_s, fit.count)
