"""The probe that joins a model's taps to the sink: hooks on in the steps that the plan wants, off in all others."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from mappnb.capture._compiled import compiled_modules
from mappnb.capture._megatron_facts import unwrapped
from mappnb.capture.activations.estimate import Batch, check_fit, table_of, within_budget
from mappnb.capture.activations.inputs import IDS, CallReader
from mappnb.capture.activations.metrics import MetricInfo, metric_function
from mappnb.capture.activations.microbatch import Microbatch
from mappnb.capture.activations.plan import CapturePlan
from mappnb.capture.activations.tap import Handler, Tap, attached
from mappnb.capture.points import SessionLike, state_of
from mappnb.errors import CaptureError
from mappnb.paths import ACTIVATIONS

__all__ = ["ActivationProbe"]

log = logging.getLogger("mappnb")

DEGRADED = "degraded_activations"
UNSEEN = "no training step of a model was seen; of one that module.compile() compiled nothing is"
UNREAD = "samples and tokens are not known; expected token ids (integers), dims (sample, token), or numbers, dims (sample, token, feature)"


class ActivationProbe:
    """Captures activations and gradients while the program trains.

    Parameters
    ----------
    plan : CapturePlan
        What to capture.

    Notes
    -----
    The other probes tell it of forward steps (``ProbeState.watchers``); it never looks at a model outside of them, so evaluation is
    not captured. What fails here turns the capture of activations off, says so once in the log, and leaves
    ``meta["degraded_activations"]``; training and traces go on.
    """

    name = "activations"

    def __init__(self, plan: CapturePlan) -> None:
        self.plan = plan
        self._session: SessionLike | None = None
        self._sink: Any = None
        self._chunks: dict[int, _Chunk] = {}
        self._batch: Batch | None = None
        self.num_layers = 0
        self._off = False
        self._step = -1
        self._captures = False
        self._hooks: list[Any] = []
        self._rules: dict[Tap, tuple[int, ...]] = {}
        self._place: tuple[int, int] | None = None
        self._current: Microbatch | None = None
        self._infos: dict[tuple[int, int], Microbatch] = {}
        self._unread = False

    # ------------------------------------------------------------------------------------------------- the probe
    def install(self, session: SessionLike) -> None:
        """Ask to be told of forward steps."""
        self._session = session
        state = state_of(session)
        state.watchers.append(self)
        state.at_step_end.append(self.step_ended)

    def uninstall(self) -> None:
        """Take everything off and write what is captured."""
        if self._session is None:
            return
        state = state_of(self._session)
        if self in state.watchers:
            state.watchers.remove(self)
        if self.step_ended in state.at_step_end:
            state.at_step_end.remove(self.step_ended)
        self.step_ended()
        if not self._chunks:
            self._give_up("end", CaptureError(UNSEEN))
        self._off, sink, self._sink = True, self._sink, None
        if sink is not None:
            try:
                sink.close()
            except Exception as err:  # noqa: BLE001 (capture never kills training)
                self._give_up("end", err)
        self._session = None

    # ------------------------------------------------------------------------------------------- told by other probes
    def begin_schedule(
        self, chunks: list[Any], *, sequence_length: int, micro_batch: int, num_microbatches: int
    ) -> None:
        """See all model chunks of this rank, and what a step is made of."""
        if self._off:
            return
        layout = self._meta().get("layout") or {}
        self._batch = Batch(sequence_length, micro_batch, num_microbatches, int(layout.get("cp", 1)))
        self._learn(dict(enumerate(chunks)))

    def enter(
        self, model: Any, chunk: int, microbatch: int, *, training: bool, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        """Begin the forward step of a microbatch; ``kwargs`` is None where the arguments are not known yet."""
        self._place = self._current = None
        if self._off or not training or self._session is None:
            return
        step = self._session.recorder.context()[0]
        try:
            if self._chunks.get(chunk) is None or self._chunks[chunk].model is not model:
                self._learn({chunk: model})
            if step != self._step:
                self.step_ended()
                self._begin(step)
            if self._captures:
                self._place = (chunk, max(microbatch, 0))
                if kwargs is not None:
                    self._called(chunk, args, kwargs)
        except Exception as err:  # noqa: BLE001
            self._give_up("forward step", err)

    def leave(self) -> None:
        """End the forward step."""
        self._place = self._current = None

    def step_ended(self) -> None:
        """Hand the step's captures to the writer, and take the hooks off."""
        step, self._step = self._step, -1
        self.leave()
        self._take_off()
        if self._unread and not self._infos:
            self._give_up("arguments of the model", CaptureError(UNREAD))
        self._unread = False
        self._infos.clear()
        if self._captures and self._sink is not None:
            self._captures = False
            try:
                self._sink.end_step(step)
            except Exception as err:  # noqa: BLE001
                self._give_up("end of step", err)
        self._captures = False

    # ----------------------------------------------------------------------------------------------------- models
    def _meta(self) -> dict[str, Any]:
        return self._session.meta if self._session is not None else {}

    def _learn(self, models: Mapping[int, Any]) -> None:
        """Find the taps of models not seen before; refuse a plan that does not fit or costs too much."""
        new = {number: model for number, model in models.items() if self._known(number) is not model}
        if not new or self._off:
            return
        try:
            for number, model in new.items():
                self._chunks[number] = _Chunk(model, number, self)
            taps = [tap for chunk in self._chunks.values() for tap in chunk.taps]
            facts = self._facts()
            self.num_layers = int(facts["num_layers"])
            check_fit(self.plan, facts)
            self._tell_missing()
            if self._batch is not None:
                within_budget(self.plan, table_of(self.plan, taps, self._batch, facts))
            for rule in self.plan.rules:
                if rule.mode == "metric":
                    metric_function(rule.options["metric"])
            self._open(facts)
        except Exception as err:  # noqa: BLE001
            self._give_up("plan", err)

    def _known(self, number: int) -> Any:
        chunk = self._chunks.get(number)
        return None if chunk is None else chunk.model

    def _facts(self) -> dict[str, Any]:
        from mappnb.capture.activations.facts import model_facts

        facts = model_facts([chunk.model for chunk in self._chunks.values()])
        if "num_layers" not in facts:
            facts["num_layers"] = max(chunk.num_layers() for chunk in self._chunks.values())
        return facts

    def _tell_missing(self) -> None:
        lines = [line for chunk in self._chunks.values() for line in chunk.missing]
        known = self._meta().setdefault("missing_points", [])
        known += [line for line in dict.fromkeys(lines) if line not in known]

    def _open(self, facts: dict[str, Any]) -> None:
        """Make the sink, once the first model is known."""
        if self._sink is not None or self._session is None:
            return
        from mappnb.capture.activations.sink import ActivationSink

        meta = self._meta()
        about = {
            "rank": int(meta.get("rank", _rank())),
            "coords": dict(meta.get("coords") or {}),
            "layout": dict(meta.get("layout") or {}),
            "model": facts,
        }
        session = self._session

        def tell(**counters: Any) -> None:
            session.note(activation_counters=counters)

        self._sink = ActivationSink(
            self.plan,
            about,
            lambda: session.folder(ACTIVATIONS),
            self._give_up,
            tell=tell,
        )

    # ------------------------------------------------------------------------------------------------------- steps
    def _begin(self, step: int) -> None:
        """Put hooks on for a step, if any rule wants it."""
        self._step = step
        rules = [i for i, rule in enumerate(self.plan.rules) if rule.wants_step(step)]
        self._captures = bool(rules) and self._sink is not None
        if not self._captures:
            return
        self._rules = {}
        for chunk in self._chunks.values():
            for tap in chunk.taps:
                wanted = tuple(i for i in rules if i in chunk.rules_of(tap))
                if wanted:
                    self._rules[tap] = wanted
            self._hooks += chunk.watch_calls()
            self._put_weights(chunk, rules, step)
        self._hooks.append(attached(self._rules, self._seen, bind=self._bound))

    def _put_weights(self, chunk: _Chunk, rules: list[int], step: int) -> None:
        for name, (tensor, shard, layer) in chunk.weights().items():
            point = name.rpartition(".")[2]
            wanted = [r for i in rules if (r := self.plan.rules[i]).wants(point, layer, num_layers=self.num_layers)]
            if wanted and shard.writes:
                full = any(rule.mode == "full" for rule in wanted)
                self._sink.weights(step, point, layer, tensor, shard, dtype="" if full else wanted[0].options["dtype"])

    def _take_off(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._rules = {}

    def _called(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """See the arguments of the model's call: the microbatch begins."""
        if self._place is None or self._place[0] != number or self._current is not None:
            return
        try:
            reader = self._chunks[number].reader
            info = reader.read(args, kwargs, step=self._step, chunk=number, microbatch=self._place[1])
            self._unread = info is None
            if info is not None:
                self._current = self._infos[self._place] = info
                self._sink.begin(info)
        except Exception as err:  # noqa: BLE001
            self._give_up("arguments of the model", err)

    # ------------------------------------------------------------------------------------------------------- tensors
    def _seen(self, tap: Tap, tensor: Any) -> None:
        if self._current is not None:
            self._keep(self._current, tap, tensor)

    def _bound(self) -> Handler:
        """Return the handler of a gradient whose forward passes now: of the microbatch in the recorder's context."""
        session = self._session
        info = None
        if session is not None:
            _, _, chunk, microbatch = session.recorder.context()
            info = self._infos.get((max(chunk, 0), max(microbatch, 0)))
        if info is None:
            return _nothing

        def keep(tap: Tap, tensor: Any) -> None:
            self._keep(info, tap, tensor)

        return keep

    def _keep(self, info: Microbatch, tap: Tap, tensor: Any) -> None:
        if self._off or self._sink is None:
            return
        try:
            for index in self._rules.get(tap, ()):
                rule = self.plan.rules[index]
                if rule.mode == "metric":
                    self._measure(rule.options["metric"], info, tap, tensor)
                else:
                    self._sink.put(index, tap, tensor, grad=tap.grad, info=info)
        except Exception as err:  # noqa: BLE001
            self._give_up(tap.name, err)

    def _measure(self, name: str, info: Microbatch, tap: Tap, tensor: Any) -> None:
        about = MetricInfo(tap.point, tap.layer, tap.grad, tap.shard, info)
        value = metric_function(name)(tensor.detach(), about)
        if value is not None and self._session is not None:
            self._session.metric(name, value, microbatch=info.microbatch, chunk=info.chunk, layer=tap.layer)

    def _give_up(self, where: str, err: BaseException) -> None:
        """Stop capturing; training goes on."""
        if self._off:
            return
        self._off = True  # perhaps in another thread: the hooks come off at the end of the step
        reason = f"{where}: {err}" if where == "plan" else f"{where}: {type(err).__name__}: {err}"
        if self._session is not None:
            self._session.note(**{DEGRADED: reason})
        rank = self._meta().get("rank", "?")
        log.warning("mappnb: rank %s: activations are not captured (%s); training and recording continue", rank, reason)


class _Chunk:
    """A model chunk, and its taps."""

    def __init__(self, model: Any, number: int, probe: ActivationProbe) -> None:
        from mappnb.capture.activations.taps import find_taps

        self.model, self.number, self._probe = model, number, probe
        self.core = unwrapped(model)
        self.missing: list[str] = []
        names = [str(name) for name in probe.plan.point_names()]
        self.taps = find_taps(model, points=names, names=probe.plan.names, missing=self.missing) if names else []
        meta = probe._meta()
        self.reader = CallReader(self.core, meta.get("coords") or {}, meta.get("layout") or {})
        self._wanted: dict[Tap, tuple[int, ...]] = {}

    def num_layers(self) -> int:
        """Return the number of layers of a model whose configuration does not tell it."""
        from mappnb.capture.activations.taps import find_taps

        taps = find_taps(self.model, names=self._probe.plan.names)
        return max((tap.layer for tap in taps), default=-1) + 1

    def rules_of(self, tap: Tap) -> tuple[int, ...]:
        """Return the numbers of the rules that want a tap in some step."""
        found = self._wanted.get(tap)
        if found is None:
            rules, num_layers = self._probe.plan.rules, self._probe.num_layers
            found = tuple(
                i
                for i, rule in enumerate(rules)
                if rule.wants(tap.point, tap.layer, grad=tap.grad, num_layers=num_layers)
            )
            self._wanted[tap] = found
        return found

    def weights(self) -> dict[str, Any]:
        """Return the weight points that the plan names."""
        from mappnb.activation_points import WEIGHTS
        from mappnb.capture.activations.weights import weights_of

        names = [str(name) for name in self._probe.plan.point_names() if name.point in WEIGHTS]
        return weights_of(self.model, names) if names else {}

    def watch_calls(self) -> list[Any]:
        """Put on the hooks that see the arguments of the model's calls.

        A torch model is found while it is being called, too late for a hook on itself: the module inside that gets the same arguments,
        or the embedding, tells then.
        """
        inner = [self.core, *self.core.children(), *_embeddings(self.core)]
        compiled = compiled_modules(self.core)
        seen = [m for m in inner if _takes_ids(m) and id(m) not in compiled]
        return [m.register_forward_pre_hook(self._called(m), with_kwargs=True) for m in seen]

    def _called(self, module: Any) -> Any:
        probe, number = self._probe, self.number
        names = [p.name for p in inspect.signature(module.forward).parameters.values()]

        def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            probe._called(number, (), {**dict(zip(names, args, strict=False)), **kwargs})

        return called


def _takes_ids(module: Any) -> bool:
    """Whether a module is called with token ids."""
    return any(name in IDS for name in inspect.signature(module.forward).parameters)


def _embeddings(core: Any) -> list[Any]:
    import torch

    return [m for m in core.modules() if isinstance(m, torch.nn.Embedding)][:1]


def _nothing(tap: Tap, tensor: Any) -> None:
    return None


def _rank() -> int:
    import torch.distributed as dist

    from mappnb.capture.torch_programs import environment_rank

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return (environment_rank() or (0, 1))[0]
