"""Self time with waits removed, per step and rank: what the straggler detector judges."""

from __future__ import annotations

import json

import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._work_feed import dataset_tables, run_tables
from mappnb.analysis._work_live import WorkTable
from mappnb.analysis._work_table import as_dataset, join
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.tables import step_range

__all__ = ["WorkTable", "work"]


def work(run: Run | xr.Dataset, *, step: int | slice | None = None) -> xr.Dataset:
    """Return the self time of each rank in each step, by part, with the waits for other ranks taken out.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded, imported or simulated.
    step : int or slice, optional
        Steps to look at; all by default.

    Returns
    -------
    Dataset, dims (step, rank, part)
        ``seconds`` (step, rank, part), s: self time, nested spans of other parts, waits and transfers taken out; ``count`` (step,
        rank, part): spans; ``present`` (step, rank): the rank has events in the step; ``wait_s`` and ``transfer_s`` (step, rank),
        s: blocked in transfers before and after the last member had come; ``imposed_s`` (step, rank), s: what the rank made others
        wait in the calls to which it came last; ``last_calls`` and ``calls`` (step, rank): calls to which it came last, alone, and
        all that it shared with a recorded rank; ``step_s`` (step,), s: first start to last end over the ranks. Coordinates:
        ``step``, ``rank``, ``host`` (rank,), ``part`` such as ``forward@3``, ``part_kind`` and ``part_stage`` (part,), -1 for no stage.

    Raises
    ------
    MappnbError
        If there are no events in these steps, or none belongs to a step.

    Notes
    -----
    At each instant the innermost span of a thread says what the thread does. Kinds of parts: compute by its phase (``compute``
    where it has none), by stage; optimizer, data, checkpoint, evaluation, gc (garbage collections of Python); ``host``: all else from
    the first start to the last end of the rank in the step, holes included. For a rank with one lane, the parts, ``wait_s`` and
    ``transfer_s`` sum to that extent. In steps in which a rank computes on device lanes, those count and the host spans that issued the
    work do not; waits and transfers that another lane of the rank computes beside are not waits.

    A transfer in flight beside the program (``Flag.ASYNC``) blocks nobody; the event that waits for it does. Calls are matched by
    identity, never by time (:func:`mappnb.analysis.match`). Steps that were repeated after a restart count once, as run last. The
    straggler is who imposes and does not wait (Jiang et al., MegaScale, arXiv:2402.15627, section 5.1, compares compute alone).
    """
    tables = list(run_tables(run, step_range(step)) if isinstance(run, Run) else dataset_tables(events_of(run, step)))
    if not any(t.present.any() for t in tables):
        raise MappnbError(_nothing(run, step))
    attrs = run._attrs() if isinstance(run, Run) else run.attrs
    return as_dataset(join(tables), hosts=hosts_of(run), attrs=dict(attrs))


def _nothing(run: Run | xr.Dataset, step: int | slice | None) -> str:
    where = f"{run.path}: " if isinstance(run, Run) else ""
    if step is not None:
        return f"work: {where}no events in step {step}; see run.steps for the steps that there are"
    return (
        f"work: {where}no event belongs to a step; expected events with step 0 or above: record with mappnb.step() around each "
        "iteration (in torch.profiler traces prof.step() marks them), or give the events a 'step' of your own"
    )


def hosts_of(run: Run | xr.Dataset) -> dict[int, str]:
    """Return the host of each rank where it is known; of a dataset, which ranks share one, as ``host of rank 8``."""
    if isinstance(run, Run):
        return {int(r): str(i.get("host") or "") for inc in run.incarnations for r, i in inc.ranks.items()}
    shared = json.loads(run.attrs.get("clocks", "{}"))
    return {int(r): f"host of rank {min(ranks)}" for groups in shared.values() for ranks in groups for r in ranks}
