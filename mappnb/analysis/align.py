"""Clocks of different hosts, aligned by what collectives tell: offset and drift of every rank, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._align_fit import fit_clocks
from mappnb.analysis._align_input import Observations, observe
from mappnb.analysis._align_output import to_dataset, to_model
from mappnb.analysis._input import events_of
from mappnb.clockmodel import ClockModel
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.schema import EVENTS
from mappnb.terms import Category

__all__ = ["align", "align_run", "aligned", "clock_model", "ping_pong"]

Array = np.ndarray[Any, Any]
TRANSFERS = (Category.COLLECTIVE, Category.P2P)


def align(
    run: Run | xr.Dataset,
    *,
    incarnation: int | None = None,
    reference: int | None = None,
    prior: Mapping[int, tuple[float, float]] | None = None,
    seed: int = 0,
) -> xr.Dataset:
    """Return offset and drift of every rank's clock against one rank's, with what is known of their error.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded or imported.
    incarnation : int, optional
        Which restart of the job; the newest by default.
    reference : int, optional
        Rank whose clock stays as it is; the lowest by default. Offsets are against it, and it gives the rate of the run clock.
    prior : mapping of int to (float, float), optional
        Offsets that are known from elsewhere, a ping-pong between hosts for instance: rank -> (``offset_ns`` minus that of the reference,
        its standard deviation), both in ns, in the middle of the events (:func:`ping_pong`).
    seed : int
        Of the resampling.

    Returns
    -------
    Dataset, dims (rank,) and (rank, piece)
        ``offset_ns``: what to add to the rank's own times (``raw_start_ns``) at ``attrs["reference_ns"]`` of the run clock; as large
        as the times between the clocks' zeros (boots of hosts, or 1970); ``offset_ms``: the same to be read: by how much the rank's events
        move, in ms, from where ``start_ns`` had them (hosts' anchors, if recorded), beyond those of the reference; above 0 is later;
        ``drift_ppm``: by how much its clock runs faster than the reference's there; ``sigma_ns``: standard deviation of the correction,
        root mean square over the time of the events; ``bound_ns``: half width that covers the true correction in at least 95 % of cases
        (short runs: see the notes);
        ``hard_low_ns``, ``hard_high_ns``: offsets outside contradict causality, infinite where nothing bounds them; ``drift_sigma_ppm``;
        ``residual_ns``: robust standard deviation of single ends from their call's; ``violations``: calls, of ``num_calls``, that the
        rank left before the last had come, by the model and beyond its error; ``num_steps``: clock steps; ``clock``: equal for ranks
        that share a clock.
        ``piece_since_ns``, ``piece_at_ns``, ``piece_offset_ns``, ``piece_rate`` (rank, piece): the correction in full, as
        :class:`mappnb.clockmodel.ClockPieces` has it.

    Raises
    ------
    MappnbError
        If there are no events, or no calls that connect all clocks; the message names the ranks.

    Notes
    -----
    Nobody leaves a synchronising collective before the last member has arrived, so all leave together but for exit noise: ends of one
    call measure the clocks against each other; starts and ends bound them. Median polish over blocks of calls, robust least squares over
    the graph of clocks (offset and drift; steps where residuals change), sigma by resampling the residuals (wild bootstrap), hard bounds
    by shortest paths over the difference constraints. Broadcast, reduce and p2p bound in one direction; where nothing else connects two
    parts of the job, the middle of such bounds is taken. An exit delay that a rank has always and in every kind of call looks like an
    offset: no method without a second clock can tell (``docs/alignment.md``).

    Short runs: ``bound_ns`` is one number for the whole time, 2.3 times a root mean square, from the scatter of the calls that there are.
    The truth can lie outside where fewer than eight calls span seconds in which clocks drift (the rate is then hardly measured, and held
    near 0 with a standard deviation of 200 ppm), at the first and last moments of such a run (the error of a rate is √3 times its root mean
    square there), and where one of fewer than about 100 calls is an outlier (blocks are single calls then, and cannot outvote it).
    """
    events, ranks = _events(run, incarnation)
    obs = observe(events, ranks)
    at = obs.ranks[0] if reference is None else reference
    if at not in obs.ranks:
        raise MappnbError(f"align: the reference rank {at} has no events; ranks that have: {obs.ranks[:20].tolist()}")
    found = fit_clocks(obs, int(np.searchsorted(obs.ranks, at)), _differences(obs, prior), np.random.default_rng(seed))
    return to_dataset(obs, found, events.attrs, int(events.incarnation.values[0]))


def _events(run: Run | xr.Dataset, incarnation: int | None) -> tuple[xr.Dataset, list[int] | None]:
    """Return the transfers of one incarnation, and the ranks that have events in it."""
    if isinstance(run, Run):
        numbers = [i.number for i in run.incarnations]
        number = incarnation if incarnation is not None else (numbers[-1] if numbers else 0)
        keys = {p.key for p in run._reader("events").parts if p.rows}
        ranks = sorted(r for i, r in keys if i == number)
        return run.sel(category=TRANSFERS, incarnation=number) if numbers else run.events, ranks
    events = events_of(run)
    numbers = sorted(pd.unique(events.incarnation.values).tolist())
    number = incarnation if incarnation is not None else (numbers[-1] if numbers else 0)
    if numbers and number not in numbers:
        raise MappnbError(f"align: no incarnation {number} in these events; there are {numbers}")
    if len(numbers) > 1:
        events = events.isel(event=np.flatnonzero(events.incarnation.values == number))
    return events, None


def _differences(obs: Observations, prior: Mapping[int, tuple[float, float]] | None) -> list[tuple[int, float, float]]:
    """Return what is known of clocks beforehand: (rank's index, offset against the reference, standard deviation), ns."""
    known = {int(r): i for i, r in enumerate(obs.ranks)}
    out = []
    for rank, (offset, sigma) in (prior or {}).items():
        if rank not in known or not sigma > 0:
            raise MappnbError(
                f"align: prior for rank {rank} is ({offset}, {sigma}); expected a rank with events and a standard deviation above 0 ns"
            )
        out.append((known[rank], float(offset), float(sigma)))
    return out


def clock_model(*alignments: xr.Dataset) -> ClockModel:
    """Return alignments, one per incarnation, as a model that a :class:`mappnb.run.Run` or :func:`aligned` uses.

    Parameters
    ----------
    *alignments : Dataset
        As :func:`align` returns them.
    """
    return to_model(alignments)


def aligned(events: xr.Dataset, alignment: xr.Dataset | ClockModel | None = None) -> xr.Dataset:
    """Return events with their times by an alignment; ``raw_start_ns`` stays.

    Parameters
    ----------
    events : Dataset, dims (event,)
        In memory. Where ``raw_start_ns`` is -1, ``start_ns`` is taken for the own clock and kept there.
    alignment : Dataset or ClockModel, optional
        What :func:`align` returned; of these events by default.

    Returns
    -------
    Dataset, dims (event,)
        ``start_ns`` and ``duration_ns`` by the model, its id in ``attrs["clock_model"]``, in the order of the input. A duration changes
        with the drift (50 ppm: 50 µs in a second), and where a clock stepped inside the event.
    """
    events = events_of(events)
    if alignment is None:
        alignment = align(events)
    model = alignment if isinstance(alignment, ClockModel) else to_model([alignment])
    raw = events.raw_start_ns.values
    own = raw if bool((raw >= 0).all()) else events.start_ns.values
    start, end = own.copy(), own + events.duration_ns.values
    keys = (events.incarnation.values.astype(np.int64) << 32) | events["rank"].values
    order = np.argsort(keys, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else ():
        key = (int(keys[part[0]] >> 32), int(keys[part[0]] & 0xFFFFFFFF))
        start[part] += model.shift(key, own[part])
        end[part] += model.shift(key, end[part])
    values = {"start_ns": start, "raw_start_ns": own, "duration_ns": np.maximum(end - start, 0)}
    changed = {k: ("event", v, dict(events[k].attrs)) for k, v in values.items() if k in EVENTS}
    return events.assign(changed).assign_attrs(clock_model=model.name)


def align_run(run: Run, **options: Any) -> xr.Dataset:
    """Align every incarnation of a run, let the run use the result for all that it reads from now on, and return the newest alignment.

    Parameters
    ----------
    run : Run
        Nothing is written to its directory; ``run.use_clock(None)`` takes it back.
    **options
        As of :func:`align`, without ``incarnation``.

    Raises
    ------
    MappnbError
        If the newest incarnation cannot be aligned. One before it keeps the clocks it has, and ``run.meta["problems"]`` says why.
    """
    done: list[xr.Dataset] = []
    numbers = [i.number for i in run.incarnations]
    run.use_clock(None)
    for number in numbers:
        try:
            done.append(align(run, incarnation=number, **options))
        except MappnbError as err:
            if number == numbers[-1]:
                raise
            run.store.problems[f"clocks of incarnation {number}"] = str(err)
    if not done:
        raise MappnbError(f"{run.path}: nothing to align yet; call run.refresh() when the job is further")
    model, before = to_model(done), run.clock_model
    whole = ClockModel(
        model.name,
        {**before.offset_ns, **model.offset_ns},
        {**before.uncertainty_ns, **model.uncertainty_ns},
        model.pieces,
    )
    run.use_clock(whole)
    return done[-1]


def ping_pong(sent_ns: Array, received_ns: Array, answered_ns: Array, returned_ns: Array) -> tuple[float, float]:
    """Return the offset that a ping-pong between two clocks tells, and its standard deviation, ns: a ``prior`` of :func:`align`.

    Parameters
    ----------
    sent_ns, returned_ns : arrays, shape (round,)
        When the reference sent and got the answer back, on its own clock, ns.
    received_ns, answered_ns : arrays, shape (round,)
        When the other rank got and answered it, on its own clock, ns.

    Notes
    -----
    NTP's on-wire protocol (RFC 5905, section 8): the round with the shortest way decides; the way out may be anything from none to all
    of it, so sigma is half the round trip over √3.
    """
    sent, received, answered, returned = (
        np.asarray(v, np.int64) for v in (sent_ns, received_ns, answered_ns, returned_ns)
    )
    trip = (returned - sent) - (answered - received)
    best = int(trip.argmin())
    offset = ((sent - received)[best] + (returned - answered)[best]) / 2
    return float(offset), max(float(trip[best]) / 2 / np.sqrt(3.0), 1.0)
