"""The datasets that mappnb writes and reads: variables, dims, dtype, unit and meaning, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mappnb.errors import SchemaError
from mappnb.terms import EVENT

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "EVENTS",
    "FORMAT_VERSION",
    "METRICS",
    "SITE_FIELDS",
    "STEPS",
    "TELEMETRY",
    "Var",
    "check",
    "empty",
    "missing",
]

FORMAT_VERSION = 1
"""Version of the run directory's format. Readers accept this version and every older one."""


@dataclass(frozen=True, slots=True)
class Var:
    """One variable of a dataset.

    Attributes
    ----------
    dtype : type
        NumPy scalar type; ``str`` stands for an object array of Python strings.
    dims : tuple of str
        Names of the dimensions.
    unit : str
        Unit, ``"1"`` for plain numbers.
    meaning : str
        One sentence.
    """

    dtype: type
    dims: tuple[str, ...]
    unit: str
    meaning: str

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype of the array in memory."""
        return np.dtype(object) if self.dtype is str else np.dtype(self.dtype)


SITE_FIELDS: tuple[str, ...] = ("category", "op", "name", "phase", "layer", "dtype")
"""What a *site* (the static description of an event, stored once per segment) holds, in order."""

_E = (EVENT,)
EVENTS: dict[str, Var] = {
    "incarnation": Var(np.int32, _E, "1", "restart of the job that wrote the event, from 0"),
    "rank": Var(np.int32, _E, "1", "global rank"),
    "step": Var(np.int32, _E, "1", "optimizer step; -1 before the first"),
    "category": Var(str, _E, "1", "class of the event: compute, collective, p2p, wait, data, ..."),
    "op": Var(str, _E, "1", "operation: all_reduce, send, forward_step, layer, attention, ..."),
    "name": Var(str, _E, "1", "free name: module path, user's span; may be empty"),
    "phase": Var(str, _E, "1", "forward, backward, backward_input, backward_weight, recompute or none"),
    "start_ns": Var(np.int64, _E, "ns", "start on the run clock, by the best clock model; raw_start_ns beside it"),
    "raw_start_ns": Var(np.int64, _E, "ns", "start on the rank's own monotonic clock; never changed"),
    "duration_ns": Var(np.int64, _E, "ns", "length; never negative"),
    "issue_ns": Var(
        np.int64, _E, "ns", "host time on the rank's own clock at which device work was issued; -1 for host work"
    ),
    "cpu_ns": Var(np.int64, _E, "ns", "CPU time of the recording thread; -1 if not measured"),
    "stream": Var(np.int32, _E, "1", "device stream; -1 for host work"),
    "thread": Var(np.int32, _E, "1", "thread of the rank, numbered in order of first use"),
    "depth": Var(np.int16, _E, "1", "number of enclosing events of the same thread"),
    "stage": Var(np.int16, _E, "1", "pipeline stage in model order; -1 if not applicable"),
    "chunk": Var(np.int16, _E, "1", "model chunk (virtual pipeline) on the rank; -1 if not applicable"),
    "microbatch": Var(np.int32, _E, "1", "microbatch in the step; -1 if not applicable"),
    "layer": Var(np.int32, _E, "1", "global layer number from 0; -1 if not applicable"),
    "bytes": Var(np.int64, _E, "bytes", "payload of a transfer on this rank; -1 if not applicable"),
    "dtype": Var(str, _E, "1", "element type of the payload; may be empty"),
    "group": Var(np.int64, _E, "1", "id of the process group, equal on all its members; -1 if none"),
    "seq": Var(
        np.int64,
        _E,
        "1",
        "sequence number in the group, or in the (group, source, destination) pair for p2p; -1 if none",
    ),
    "peer": Var(
        np.int32, _E, "1", "global rank of the other side of a p2p, or the root of a rooted collective; -1 if none"
    ),
    "flags": Var(np.uint16, _E, "1", "bits of mappnb.terms.Flag"),
}
"""Variables of an events dataset, dims (event,)."""

_S = ("step", "rank")
STEPS: dict[str, Var] = {
    "start_ns": Var(np.int64, _S, "ns", "start of the step on the run clock; -1 where the rank has no such step"),
    "end_ns": Var(np.int64, _S, "ns", "end of the step on the run clock; -1 where it has not ended"),
    "loss": Var(np.float64, _S, "1", "mean loss over the rank's microbatches; NaN on ranks that do not see it"),
    "grad_norm": Var(np.float64, _S, "1", "norm of the gradient before clipping; NaN if not known"),
    "lr": Var(np.float64, _S, "1", "learning rate of the first parameter group; NaN if not known"),
    "tokens": Var(
        np.float64, _S, "1", "tokens that the rank's model replica processed, sequence shards of other ranks included"
    ),
    "microbatches": Var(np.float64, _S, "1", "microbatches that the rank ran forward"),
    "skipped": Var(np.float64, _S, "1", "1 where the optimizer skipped its update, as on overflow"),
    "memory_bytes": Var(
        np.float64,
        _S,
        "bytes",
        "memory in use at the end of the step: allocator on a GPU, resident set (telemetry's last sample) on a CPU",
    ),
    "memory_peak_bytes": Var(np.float64, _S, "bytes", "peak of the same within the step"),
}
"""Variables of the step table, dims (step, rank)."""

_T = ("sample",)
TELEMETRY: dict[str, Var] = {
    "time_ns": Var(np.int64, _T, "ns", "time of the sample on the run clock"),
    "cpu_fraction": Var(
        np.float64,
        _T,
        "1",
        "CPU time of the process since the last sample over wall time; above 1 with several threads",
    ),
    "run_queue_fraction": Var(
        np.float64, _T, "1", "time the main thread was runnable but waited for a CPU, over wall time"
    ),
    "rss_bytes": Var(np.float64, _T, "bytes", "resident set of the process"),
    "host_cpu_fraction": Var(np.float64, _T, "1", "busy share of all CPUs of the host"),
    "host_memory_fraction": Var(np.float64, _T, "1", "memory in use on the host, over all of it"),
    "cpu_mhz": Var(np.float64, _T, "MHz", "current CPU frequency; NaN where the host does not tell"),
    "net_sent_bytes": Var(np.float64, _T, "bytes", "sent by the host's network devices since the last sample"),
    "net_received_bytes": Var(np.float64, _T, "bytes", "received by the host's network devices since the last sample"),
    "sm_clock_mhz": Var(np.float64, _T, "MHz", "GPU core clock"),
    "memory_clock_mhz": Var(np.float64, _T, "MHz", "GPU memory clock"),
    "power_w": Var(np.float64, _T, "W", "GPU power draw"),
    "temperature_c": Var(np.float64, _T, "degC", "GPU temperature"),
    "throttle_reasons": Var(np.int64, _T, "1", "NVML clocks-event-reasons bit mask; -1 if not known"),
    "gpu_fraction": Var(np.float64, _T, "1", "GPU utilisation as NVML gives it"),
    "gpu_memory_bytes": Var(np.float64, _T, "bytes", "GPU memory in use"),
}
"""Variables of the telemetry table, dims (sample,); NaN means that the machine does not tell."""

METRICS: dict[str, Var] = {
    "step": Var(np.int32, _T, "1", "optimizer step"),
    "name": Var(str, _T, "1", "what is counted: tokens, document_tokens, expert_tokens, or a user's own name"),
    "chunk": Var(np.int16, _T, "1", "model chunk; -1 if not applicable"),
    "microbatch": Var(np.int32, _T, "1", "microbatch in the step; -1 if not applicable"),
    "layer": Var(np.int32, _T, "1", "global layer number from 0; -1 if not applicable"),
    "index": Var(np.int32, _T, "1", "position among values of one name: document, expert; 0 for single values"),
    "value": Var(np.float64, _T, "1", "the value"),
}
"""Variables of the table of user-registered and per-microbatch numbers, dims (sample,)."""


def missing(var: Var) -> object:
    """Return the value that says "not applicable" in ``var``: NaN, -1, 0 for unsigned, or an empty string."""
    if var.dtype is str:
        return ""
    kind = np.dtype(var.dtype).kind
    return {"f": np.nan, "u": 0}.get(kind, -1)


def check(ds: xr.Dataset, schema: Mapping[str, Var], *, name: str) -> None:
    """Raise SchemaError unless ``ds`` has every variable of ``schema`` with its dims and dtype.

    Parameters
    ----------
    ds : Dataset
        What to check.
    schema : mapping of str to Var
        One of the schemas of this module.
    name : str
        What to call the dataset in the message.

    Raises
    ------
    SchemaError
        Names the first variable at fault, what was found and what was expected.
    """
    for key, var in schema.items():
        if key not in ds:
            raise SchemaError(f"{name}: no variable {key!r} ({var.meaning}); found {sorted(map(str, ds))}")
        if (ds[key].dims, ds[key].dtype) != (var.dims, var.numpy_dtype):
            raise SchemaError(
                f"{name}.{key}: found dims {ds[key].dims} dtype {ds[key].dtype}; "
                f"expected dims {var.dims} dtype {var.numpy_dtype}"
            )


def empty(schema: Mapping[str, Var], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return arrays of the given sizes for every variable of ``schema``, filled with "not applicable"."""
    return {
        key: np.full([sizes[d] for d in var.dims], missing(var), dtype=var.numpy_dtype) for key, var in schema.items()
    }
