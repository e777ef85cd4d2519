"""ScheduleLab: pipeline schedules side by side, redrawn while costs, memory and stragglers change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError, did_you_mean
from mappnb.run import Run
from mappnb.sched.costs import Costs
from mappnb.sched.schedule import Schedule
from mappnb.sched.stragglers import Straggler
from mappnb.widgets._lab_answers import lanes_told, pack_columns, table_columns, table_rows, windows_told
from mappnb.widgets._lab_controls import Units, changed, controls, values_of
from mappnb.widgets._lab_entries import Entry, EntryLike, Sizes, choices, entries_of
from mappnb.widgets._lab_lanes import Lane
from mappnb.widgets._lab_model import REPLAY, LabModel
from mappnb.widgets._lab_numbers import Limit
from mappnb.widgets._lab_plots import columns, figures, legend, memory_columns
from mappnb.widgets._lab_recorded import Recorded
from mappnb.widgets._lab_settings import Settings, Slow, base_of, checked, costs_code, stragglers_code
from mappnb.widgets._messages import Answer, number, text, whole
from mappnb.widgets._plot_view import PlotView
from mappnb.widgets._timeline_options import PARTS
from mappnb.widgets.view import bundle, static_text

__all__ = ["LAB_PARTS", "ScheduleLab"]

LAB_PARTS = (*PARTS, "lab_lanes.js", "lab_controls.js", "lab_plots.js", "lab.js")
SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zb_v")
SEED = 0


class ScheduleLab(PlotView):
    """Pipeline schedules at the same costs, side by side: timelines, memory, Pareto, idle time, numbers; knobs for the costs.

    Parameters
    ----------
    costs : Costs, optional
        What the work costs; measured in ``run`` by default (:func:`mappnb.fit_costs`), without a run 10 ms for each pass. A Run or
        events Dataset in its place counts as ``run``.
    run : Run or Dataset, dims (event,), optional
        A recorded run: its step is shown on top, then the replay of its own schedule with its error, then the others.
    schedules : sequence of str, (str, mapping) or Schedule
        Names of registered schedules or policies (``"dfc"``, ``"bfc"``, ``"adaptive"``, ``"critical_path"``), with their options, or
        schedules themselves.
    num_ranks, num_microbatches : int, optional
        Pipeline ranks, microbatches of a step: 4 and 16, or those of the run.
    num_chunks : int, optional
        Chunks per rank of the schedules that leave it open: 2, or as many as the run has if that is more than one.
    memory_limit : number or array, dims (rank,), optional
        In the unit of the costs.
    stragglers : sequence of Straggler
        What is slow. A single simple one is where the knob stands.
    step : int, optional
        Step of the run to show; by default the one nearest to the median.
    adjust : mapping, optional
        Where the knobs stand: ``forward_s``, ``backward_input_s``, ``backward_weight_s``, ``p2p_s``, ``transfer_s``; seconds where the
        cost is a number, a factor where it is an array or a distribution.
    seed : int, optional
        Draw durations that are distributions with this seed.
    selected : str, optional
        Label of the schedule whose memory is shown; by default the first that runs.

    Attributes
    ----------
    errors : list of str
        What went wrong in answering the browser.

    Raises
    ------
    MappnbError
        If a name is unknown or the costs or the run cannot be used. A schedule that cannot run is shown with the reason instead.

    Notes
    -----
    The numbers are those of :func:`mappnb.simulate`. No bokeh server and no network: BokehJS comes from the kernel's package over the
    view's own channel, when it is first needed.
    """

    _esm = bundle(*LAB_PARTS, render="renderLab")
    _css = static_text("timeline.css") + static_text("lab.css")

    def __init__(
        self,
        costs: Costs | Run | xr.Dataset | None = None,
        *,
        run: Run | xr.Dataset | None = None,
        schedules: Iterable[EntryLike] = SCHEDULES,
        num_ranks: int | None = None,
        num_microbatches: int | None = None,
        num_chunks: int | None = None,
        memory_limit: Limit = None,
        stragglers: Sequence[Straggler] = (),
        step: int | None = None,
        adjust: Mapping[str, float] | None = None,
        seed: int | None = None,
        selected: str | None = None,
    ) -> None:
        if isinstance(costs, (Run, xr.Dataset)):
            run, costs = costs, None
        base, recorded = (costs, None) if run is None else LabModel.measured(run, costs, step)
        base = base or Costs(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
        ranks = num_ranks or (int(recorded.rank.max()) + 1 if recorded is not None else 4)
        microbatches = num_microbatches or (int(recorded.microbatch.max()) + 1 if recorded is not None else 16)
        slow = Slow.of(stragglers[-1], ranks) if stragglers else None
        settings = Settings(checked(adjust), microbatches, memory_limit, slow or Slow(), seed)
        self._from, self._given, self._step = type(run), costs is not None, step
        self._seed = SEED if seed is None else seed
        self._all = entries_of(schedules)
        self._chosen = [e.label for e in self._all]
        sizes = Sizes(ranks, microbatches, num_chunks or _chunks(recorded))
        fixed = stragglers[:-1] if slow is not None else stragglers
        self._model: LabModel = LabModel(base, self._all, settings, sizes=sizes, stragglers=fixed, recorded=recorded)
        self._units = Units.of(base, self._model.longest_s)
        self._lanes: list[Lane] = self._model.lanes()
        self._selected = ""
        super().__init__()
        self._pick(selected)

    # --------------------------------------------------------------------------------------------------------- API
    @property
    def costs(self) -> Costs:
        """The costs as the knobs stand."""
        return self._model.costs

    @property
    def schedules(self) -> dict[str, Schedule | None]:
        """Each schedule by its label; None where it cannot run."""
        return {o.entry.label: None if o.numbers is None else o.numbers.schedule for o in self._model.outcomes}

    @property
    def results(self) -> pd.DataFrame:
        """The numbers by schedule: times in s, memory in the unit of the costs; NaN and a reason (``why``) where one cannot run."""
        return self._model.frame()

    @property
    def replay_error(self) -> float:
        """Replay of the recorded schedule over the recorded steps, minus 1; NaN without a run."""
        return self._model.replay.error if self._model.replay is not None else float("nan")

    @property
    def selected(self) -> str:
        """Label of the schedule whose memory is shown."""
        return self._selected

    @selected.setter
    def selected(self, label: str) -> None:
        self._pick(label)
        self._tell_pick()

    def set(self, **values: Any) -> None:
        """Move knobs: ``forward_s=`` and the others of ``adjust``, ``num_microbatches=``, ``memory_limit=``, ``seed=``.

        Raises
        ------
        MappnbError
            If a knob is unknown or its value cannot be.
        """
        known = ("num_microbatches", "memory_limit", "seed")
        adjust = {k: v for k, v in values.items() if k not in known}
        old = self._model.settings
        rest = {k: values[k] for k in known if k in values}
        new = {n: getattr(old, n) for n in ("num_microbatches", "memory_limit", "slow", "seed")} | rest
        self._update(Settings({**old.adjust, **checked(adjust)}, **new))
        self.send_answer(self.state())

    @property
    def code(self) -> str:
        """The Python line that makes this lab again, as it is now."""
        model, settings = self._model, self._model.settings
        said, plain = [], costs_code(model.costs)
        from_run, call = model.recorded is not None, "mappnb.widgets.ScheduleLab"
        if issubclass(self._from, Run) and not self._given:
            call = "run.schedule_lab"
        elif from_run:
            said += ["costs", "run=run"] if self._given else ["run=run"]
        else:
            said.append(plain or "costs")
        if from_run or plain is None:
            moved = {k: v for k, v in settings.adjust.items() if v != base_of(model.base, k)}
            said += [f"adjust={moved!r}"] if moved else []
        entries = [e.code for e in model.entries if e.label != REPLAY or e.name]
        said.append(f"schedules=[{', '.join(entries)}]")
        said += [f"num_ranks={model.sizes.num_ranks}", f"num_microbatches={settings.num_microbatches}"]
        said.append(f"num_chunks={model.sizes.num_chunks}")
        if settings.memory_limit is not None:
            said.append(f"memory_limit={np.asarray(settings.memory_limit).tolist()!r}")
        said += [f"stragglers={stragglers_code(model.stragglers)}"] if model.stragglers else []
        said += [f"step={self._step}"] if self._step is not None else []
        said += [f"seed={settings.seed}"] if settings.seed is not None else []
        said += [f"selected={self._selected!r}"] if self._selected else []
        return f"{call}({', '.join(said)})"

    def describe(self) -> str:
        """Return the lab in one stable line."""
        sizes = self._model.sizes
        names = ", ".join(e.label for e in self._model.entries)
        return f"ScheduleLab({names}; {sizes.num_ranks} ranks, {sizes.num_microbatches} microbatches)"

    # --------------------------------------------------------------------------------------------------- computing
    def _update(self, settings: Settings) -> None:
        self._model.update(settings)
        self._computed()

    def _computed(self) -> None:
        self._lanes = self._model.lanes()
        if (found := self._model.find(self._selected)) is None or found.numbers is None:
            self._pick(None)
        self.changed("results")

    def _pick(self, label: str | None) -> None:
        labels = [o.entry.label for o in self._model.outcomes]
        if label is None or label == "":
            reference = self._model.reference
            self._selected = reference.entry.label if reference is not None else ""
            return
        if label not in labels:
            raise MappnbError(
                f"no schedule {label!r} in the lab; there are {', '.join(labels)}{did_you_mean(label, labels)}"
            )
        self._selected = label

    # ---------------------------------------------------------------------------------------------------- messages
    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer the browser: of a lane its meta, else the probe, then everything."""
        if "lane" in content:
            meta = self._lane(content).meta(self._model.longest_s * 1e9)
            self.send_answer(self._of_lane(content, meta | {"kind": "meta", "seq": content.get("seq")}))
            return
        super().on_ready(content)
        self.send_answer(self.state(whole=True))

    def state(self, *, whole: bool = False) -> Answer:
        """Return everything that the browser shows; ``whole``: with the controls and what never changes."""
        model, units = self._model, self._units
        told, arrays = pack_columns(columns(model, self._selected, **self._scales()))
        content: dict[str, Any] = {
            "kind": "state",
            "values": values_of(model.base, model.settings, units),
            "lanes": lanes_told(model, self._lanes, units),
            "table": {"columns": table_columns(units), "rows": table_rows(model, units)},
            "plots": told,
            "longest": model.longest_s * units.time_scale,
            "selected": self._selected,
            "chosen": self._chosen,
            "says": model.says(given=self._given),
        }
        if whole:
            sizes = model.sizes
            content |= {
                "controls": controls(model.base, model.settings, units, num_ranks=sizes.num_ranks),
                "choices": list(dict.fromkeys([e.label for e in self._all] + list(choices()))),
                "units": {"time": units.time, "ns": 1e9 / units.time_scale, "memory": units.memory},
                "title": f"{sizes.num_ranks} pipeline ranks, {sizes.num_chunks} chunks per rank where that is open",
                "legend": [[n, a[1], b[1]] for n, a, b in _legend()],
            }
        return Answer(content, arrays)

    def _scales(self) -> dict[str, float]:
        return {"time_scale": self._units.time_scale, "memory_scale": self._units.memory_scale}

    def on_set(self, content: dict[str, Any]) -> Answer:
        """Move knobs and compute; answer with everything that changed."""
        values = content.get("values")
        if not isinstance(values, dict):
            raise MappnbError(f"message 'set': values is {values!r:.80}; expected a mapping")
        self._update(changed(self._model.settings, values, self._model.base, self._units, seed=self._seed))
        answer = self.state()
        answer.content["windows"], arrays = windows_told(self._lanes, content.get("view"), self._model.longest_s)
        answer.arrays |= arrays
        return answer

    def on_choose(self, content: dict[str, Any]) -> Answer:
        """Compare other schedules."""
        names = content.get("names")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise MappnbError(f"message 'choose': names is {names!r:.80}; expected a list of texts")
        by_label = {e.label: e for e in self._all}
        chosen: list[Entry] = [by_label[n] if n in by_label else entries_of([n])[0] for n in names]
        self._chosen = [e.label for e in chosen]
        self._model.choose(chosen)
        self._update(self._model.settings)
        return self.state()

    def on_pick(self, content: dict[str, Any]) -> Answer:
        """Show the memory of another schedule."""
        self._pick(text(content, "label", most=200))
        self.changed("selected")
        return self._picked()

    def _picked(self) -> Answer:
        told, arrays = pack_columns({"memory": memory_columns(self._model, self._selected, **self._scales())})
        return Answer({"kind": "pick", "selected": self._selected, "plots": told}, arrays)

    def _tell_pick(self) -> None:
        self.send_answer(self._picked())

    def _lane(self, content: Mapping[str, Any]) -> Lane:
        label = text(content, "lane", most=200)
        lane = next((v for v in self._lanes if v.label == label), None)
        return Lane.empty(label, "this schedule is no longer compared") if lane is None else lane

    def _of_lane(self, content: Mapping[str, Any], told: dict[str, Any] | Answer) -> Answer:
        answer = told if isinstance(told, Answer) else Answer(told)
        answer.content["lane"] = content["lane"]
        return answer

    def on_window(self, content: dict[str, Any]) -> Answer:
        """Answer with the spans of a lane's window."""
        t0, t1 = number(content, "t0"), number(content, "t1")
        if not t1 > t0:
            raise MappnbError(f"a window ends after it begins; got {t0} to {t1}")
        lane = self._lane(content)
        rows = (whole(content, "row0", 0, lane.num_ranks), whole(content, "row1", 0, lane.num_ranks))
        return self._of_lane(content, lane.window(t0, t1, pixels=whole(content, "pixels", 16, 8192), rows=rows))

    def on_describe(self, content: dict[str, Any]) -> Answer:
        """Answer with the fields of one action of a lane."""
        lane = self._lane(content)
        if not len(lane.rank):
            raise MappnbError("this action is gone: the lab has moved on")
        return self._of_lane(content, lane.describe(whole(content, "event", 0, len(lane.rank) - 1)))

    def on_figures(self, content: dict[str, Any]) -> Answer:
        """Answer with the figures in the colours of a theme."""
        units, look = self._units, self._look(content)
        self.theme = look["theme"]
        data = columns(self._model, self._selected, **self._scales())
        made = figures(data, time_unit=units.time, memory_unit=units.memory, **look)
        return Answer({"figures": made, "theme": self.theme})

    # ------------------------------------------------------------------------------------------------------ static
    def twin_html(self) -> str:
        """Return the lab as a picture with its numbers."""
        from mappnb.widgets._lab_static import twin

        return twin(self._model, self._lanes, self._units, self.describe())

    def snapshot(self) -> Any:
        """Return a picture (SVG) with the numbers, that stays in the notebook."""
        from mappnb.widgets._lab_static import snapshot

        return snapshot(self._model, self._lanes, self._units, code=self.code, said=self.describe())

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the lab as one self-contained page: timelines that pan and zoom, plots, numbers; write it to ``path`` if given."""
        from mappnb.widgets._lab_static import page

        return self._written(page(self, self._model, self._lanes, self._units), path)

    def release(self) -> None:
        """Let go of schedules and data."""
        self._model.release()
        self._lanes = []


def _chunks(recorded: Recorded | None) -> int:
    return recorded.num_chunks if recorded is not None and recorded.num_chunks > 1 else 2


def _legend() -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    return [(light[0], light, dark) for light, dark in zip(legend("light"), legend("dark"), strict=True)]
