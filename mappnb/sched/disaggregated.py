"""fbd: forwards and backwards of a stage on different ranks (MegaFBD)."""

from __future__ import annotations

import numpy as np

from mappnb.errors import ScheduleError, did_you_mean
from mappnb.sched import codes
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, too_large
from mappnb.sched.schedule import Schedule

__all__ = ["ACTIVATIONS", "fbd"]

ACTIVATIONS: tuple[str, ...] = ("ship", "recompute")
"""How the backward rank of a stage comes by the activations."""


@register("fbd")
def fbd(*, num_stages: int, num_microbatches: int, activations: str = "ship") -> Schedule:
    """Forward rank s and backward rank p + s for each of p stages (forward-backward disaggregation: MegaFBD, arXiv:2507.19845, 4).

    Parameters
    ----------
    num_stages : int
        Stages p; the pipeline has 2 p ranks.
    num_microbatches : int
        Microbatches of a step.
    activations : str
        ``"ship"``: the forward rank sends all activations to the backward rank (``Costs.ship_bytes``). ``"recompute"``: it sends the
        input of the stage only, and the backward rank runs the forward again, as MegatronApp's code does; B then takes F longer.

    Raises
    ------
    ScheduleError
        If ``activations`` is neither.

    Notes
    -----
    Both ranks of a stage run the microbatches in their order, which is that of 1F1B's backwards. With free messages the step takes
    ``p F + p B + (m − 1) max(F, B)``, where B includes the F that is run again. Each rank works on one microbatch at a time, but a forward
    rank never waits for its backward rank: where B is the longer, inputs or activations pile up between the two.
    """
    if activations not in ACTIVATIONS:
        raise ScheduleError(
            f"fbd: activations is {activations!r}; expected one of {', '.join(ACTIVATIONS)}"
            f"{did_you_mean(activations, ACTIVATIONS)}"
        )
    too_large("fbd", num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    stage, mb = np.arange(p)[:, None], np.arange(m)[None, :]
    orders = np.concatenate([codes.pack(stage, 0, mb), codes.pack(stage, 1, mb)])
    return Schedule.from_codes(
        orders.reshape(-1),
        np.arange(2 * p + 1, dtype=np.int64) * m,
        placement=Placement.disaggregated(p),
        name="fbd",
        options={"activations": activations},
        recompute=activations == "recompute",
    )
