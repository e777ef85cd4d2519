"""Which cure a finding has: what to change, where, and which replay prices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mappnb.layout import Layout

__all__ = ["Cure", "cure_of", "finding_of"]

_WHAT = {
    "hardware": "is slow in all it computes",
    "layer": "is slow in one layer or operation",
    "stage_imbalance": "has more work than the others",
    "data_skew": "waits for microbatches of unequal length",
    "host": "is held up by its host",
    "moe_load": "has more tokens than the other experts",
    "checkpoint": "is held up by checkpoints",
}
COMPUTE: list[Any] = [{"op": "forward"}, {"op": "backward"}]


@dataclass(frozen=True, slots=True)
class Cure:
    """What to do about a finding.

    Attributes
    ----------
    action : str
        In words.
    target : str
        The host, or the flags of Megatron-LM, to change.
    fix : object
        ``fix`` of :func:`mappnb.analysis.what_if` that prices it; None where nothing can.
    ideal : str
        ``ideal`` of it: ``"mean"`` where work is dealt anew and does not vanish.
    over_stages : bool, optional
        See there; False where only microbatches and ranks of a stage are made alike.
    why_not : str
        Why there is no fix.
    """

    action: str
    target: str
    fix: Any = None
    ideal: str = "median"
    over_stages: bool | None = None
    why_not: str = ""


def finding_of(row: Any) -> str:
    """Return a row of find_stragglers in words."""
    what = _WHAT.get(row.cause, "is slow")
    who = "the job" if row.subject_kind == "job" else f"{row.subject_kind} {row.subject}"
    if row.cause == "data_skew" and row.subject_kind != "job":
        what = "has longer microbatches than its peers"
    when = "" if row.first_step < 0 else f", steps {row.first_step} to {row.last_step}"
    return f"{who} {what}{when}"


def cure_of(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    """Return the cure of a culprit.

    Parameters
    ----------
    row : named tuple
        A row of :func:`mappnb.analysis.find_stragglers`.
    layout : Layout
        Parallel layout.
    hosts : mapping of int to str
        Host of each rank.
    """
    by_cause: dict[str, Callable[[Any, Layout, Mapping[int, str]], Cure]] = {
        "stage_imbalance": _stage, "data_skew": _skew, "link": _link, "host": _host_gaps, "moe_load": _experts, "checkpoint": _checkpoint,
    }  # fmt: skip
    return by_cause.get(row.cause, _hardware)(row, layout, hosts)


def _who(row: Any) -> Any:
    """Return the fix of a rank or host itself."""
    if row.subject_kind == "host":
        return {"host": row.subject}
    if row.subject_kind in ("rank", "stage"):
        return {row.subject_kind: int(row.subject)}
    return None


def _place(row: Any, hosts: Mapping[int, str]) -> str:
    if row.subject_kind == "host":
        return f"host {row.subject}"
    if row.subject_kind != "rank":
        return f"{row.subject_kind} {row.subject}"
    host = hosts.get(int(row.subject), "")
    if (
        not host or len(set(hosts.values())) == 1
    ):  # a single host is no choice, and where ranks are many, it is not known
        return f"the GPU of rank {row.subject}"
    return f"host {host} (rank {row.subject})"


def _hardware(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    place = _place(row, hosts)
    fix = _who(row)
    if row.cause == "layer":
        text = (
            f"look at that layer's kernels on {place}; exclude it from the allocation if they are the same as elsewhere"
        )
    elif row.cause == "hardware":
        text = f"exclude {place} from the allocation, and have it tested (clocks, temperature, ECC)"
    else:
        text = f"exclude {place} from the allocation for one run: if the slowness stays, the work is unequal, else the machine was"
    return Cure(text, place, fix, why_not="" if fix else f"no replay for a {row.subject_kind}")


def _stage(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    stage, last = int(row.subject), layout.num_stages - 1
    if stage == last and last > 0:
        flags = "--decoder-last-pipeline-num-layers, or --account-for-loss-in-pipeline-split"
        text = f"give the last stage ({stage}) fewer layers: the head and the loss are its too"
    elif stage == 0:
        flags = "--decoder-first-pipeline-num-layers, or --account-for-embedding-in-pipeline-split"
        text = "give the first stage fewer layers: the embedding is its too"
    else:
        flags = "--pipeline-model-parallel-layout"
        text = f"give stage {stage} fewer layers"
    return Cure(text, flags, {"stage": stage}, "mean")


def _skew(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    text = (
        "balance the microbatches: pack documents so that each has about the same sum of squared lengths, or deal long and short ones "
        "to data-parallel ranks in turn; with context parallelism split each document"
    )
    return Cure(text, "packing of the data set (the sampler; --seq-length bounds the longest)", COMPUTE, "mean", False)


def _link(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    ends = str(row.subject).replace("→", "->").split("->")
    if row.subject_kind == "link" and len(ends) == 2 and all(e.strip().isdigit() for e in ends):
        a, b = (int(e) for e in ends)
        names = [h for h in dict.fromkeys(hosts.get(r, "") for r in (a, b)) if h]
        place = f"between {' and '.join(names)}" if len(names) == 2 else f"inside {names[0]}" if names else ""
        text = f"check cable, switch port and network card of the link {a}->{b} {place}; exclude one of its ends from the allocation"
        return Cure(
            " ".join(text.split()), " and ".join(f"host {n}" for n in names) or f"link {a}->{b}", {"link": (a, b)}
        )
    place = _place(row, hosts)
    fix = _who(row)
    text = f"check the network card of {place}, or exclude it from the allocation"
    return Cure(text, place, fix, why_not="" if fix else f"no replay for {row.subject_kind} {row.subject}")


def _host_gaps(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    place, fix = _place(row, hosts), _who(row)
    if "garbage collection" in row.evidence:
        text, target = (
            "collect garbage on all ranks in the same step, and seldom",
            "--manual-gc --manual-gc-interval 100",
        )
    elif "next batch" in row.evidence:
        text, target = f"give the data loader of {place} more workers, and see what its storage does", "--num-workers"
    else:
        text, target = (
            f"see what else runs on {place} (run queue, CPU pinning); exclude it from the allocation if that cannot end",
            place,
        )
    return Cure(text, target, fix, why_not="" if fix else f"no replay for a {row.subject_kind}")


def _experts(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    text = (
        "spread the tokens over the experts: a load-balancing loss, or a capacity beyond which tokens are dropped "
        "(both change the training)"
    )
    flags = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff, or --moe-expert-capacity-factor"
    fix = _who(row)
    return Cure(text, flags, fix if fix is not None else COMPUTE, "mean", False)


def _checkpoint(row: Any, layout: Layout, hosts: Mapping[int, str]) -> Cure:
    fix = _who(row)
    text = "write checkpoints beside the training, or less often"
    return Cure(
        text,
        "--async-save (with --ckpt-format torch_dist), or --save-interval",
        fix if fix is not None else {"op": "checkpoint"},
    )
