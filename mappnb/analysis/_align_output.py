"""An alignment as a dataset, and the dataset as a clock model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._align_fit import Fit
from mappnb.analysis._align_input import Observations
from mappnb.clockmodel import ClockModel, ClockPieces

__all__ = ["to_dataset", "to_model"]

Array = np.ndarray[Any, Any]
MODEL = "align-1"
FIRST = -(2**62)
NONE = 2**63 - 1
_UNITS = {
    "offset_ns": "ns", "offset_ms": "ms", "drift_ppm": "1e-6", "sigma_ns": "ns", "bound_ns": "ns",
    "hard_low_ns": "ns", "hard_high_ns": "ns", "drift_sigma_ppm": "1e-6",
    "residual_ns": "ns", "violations": "1", "num_calls": "1", "num_steps": "1", "clock": "1",
}  # fmt: skip


def _pieces(obs: Observations, fit: Fit, clock: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return since, at, offset and rate of the pieces of a clock, in its own time."""
    model = fit.model
    knots = sorted((k for k in model.knots if k.clock == clock), key=lambda k: k.at)
    begins = [-np.inf, *(k.at for k in knots)]
    since, at, offset, rate = [], [], [], []
    for i, begin in enumerate(begins):
        u = model.mid if len(begins) == 1 else (begin if i else min(model.mid, begins[1]))
        own_shift = obs.origin_ns - int(obs.prior_ns[clock])
        slope = model.coef[clock, 1] + sum(k.value for k in knots[:i] if k.kink)
        jumps = sum(k.value * ((u - k.at) / model.half if k.kink else 1.0) for k in knots[:i])
        value = model.coef[clock, 0] + model.coef[clock, 1] * (u - model.mid) / model.half + jumps
        since.append(round(begin) + own_shift if i else FIRST)
        at.append(round(u) + own_shift)
        offset.append(int(obs.prior_ns[clock]) + round(float(value)))
        rate.append(float(slope / model.half))
    return since, at, offset, rate


def to_dataset(obs: Observations, fit: Fit, attrs: Mapping[str, Any], incarnation: int) -> xr.Dataset:
    """Return an alignment as :func:`mappnb.analysis.align` documents it."""
    num, model = obs.num_clocks, fit.model
    parts = [_pieces(obs, fit, k) for k in range(num)]
    deepest = max(len(p[0]) for p in parts)
    tables: list[Array] = [np.full((num, deepest), f) for f in (np.int64(NONE), np.int64(0), np.int64(0), np.nan)]
    for k, part in enumerate(parts):
        for table, values in zip(tables, part, strict=True):
            table[k, : len(part[0])] = values
    middle = model.correction(np.arange(num), np.full(num, model.mid))
    steps = np.bincount([k.clock for k in model.knots if not k.kink], minlength=num)
    slope = np.array(
        [sum(k.value for k in model.knots if k.clock == c and k.kink and k.at <= model.mid) for c in range(num)]
    )
    rate = (model.coef[:, 1] + slope) / model.half
    offset = obs.prior_ns + np.rint(middle).astype(np.int64)
    of = obs.clock
    moved = offset - obs.read_ns
    data: dict[str, Any] = {
        "offset_ns": offset[of], "offset_ms": (moved - moved[fit.reference])[of] / 1e6,
        "drift_ppm": (-rate / (1.0 + rate) * 1e6)[of], "sigma_ns": fit.sigma[of],
        "bound_ns": fit.bound[of], "hard_low_ns": (offset + fit.low)[of], "hard_high_ns": (offset + fit.high)[of],
        "drift_sigma_ppm": fit.slope_sigma[of] * 1e6, "residual_ns": fit.residual, "violations": fit.violations,
        "num_calls": fit.num_calls, "num_steps": steps[of], "clock": of,
    }  # fmt: skip
    variables = {k: ("rank", v, {"units": _UNITS[k]}) for k, v in data.items()}
    names = ("piece_since_ns", "piece_at_ns", "piece_offset_ns", "piece_rate")
    pieces = {
        n: (("rank", "piece"), t[of], {"units": "ns" if t.dtype.kind == "i" else "1"})
        for n, t in zip(names, tables, strict=True)
    }
    out = xr.Dataset({**variables, **pieces}, coords={"rank": obs.ranks}, attrs=dict(attrs))
    mean = fit.residual[np.isfinite(fit.residual)]
    out.attrs |= {
        "incarnation": incarnation, "reference_rank": int(obs.ranks[np.flatnonzero(of == fit.reference)[0]]),
        "reference_ns": obs.origin_ns + round(model.mid), "residual_ns": float(np.median(mean)) if len(mean) else np.nan,
        "unmatched_fraction": obs.unmatched_fraction, "num_steps": int(steps.sum()),
    }  # fmt: skip
    out.attrs["clock_model"] = to_model([out]).name
    return out


def to_model(alignments: Iterable[xr.Dataset]) -> ClockModel:
    """Return the clock model of alignments, one per incarnation; its name tells one from another."""
    offset, width, pieces = {}, {}, {}
    digest = hashlib.blake2b(digest_size=4)
    for one in alignments:
        number = int(one.attrs["incarnation"])
        columns = [one[n].values for n in ("piece_since_ns", "piece_at_ns", "piece_offset_ns", "piece_rate")]
        for column in (one["rank"].values, *columns):
            digest.update(np.ascontiguousarray(column).tobytes())
        offsets, bounds = one.offset_ns.values.tolist(), one.bound_ns.values.tolist()
        used = (columns[0] != NONE).sum(axis=1)
        for i, rank in enumerate(one["rank"].values.tolist()):
            n = int(used[i])
            key = (number, int(rank))
            pieces[key] = ClockPieces(*(tuple(c[i, :n].tolist()) for c in columns))
            offset[key] = int(offsets[i])
            width[key] = round(bounds[i]) if np.isfinite(bounds[i]) else NONE
    return ClockModel(f"{MODEL}:{digest.hexdigest()}", offset, width, pieces)
