"""Where the points pass the modules of plain torch models: by the module names of Hugging Face's Llama and GPT-2, or by given names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mappnb.activation_points import POINTS, module_names
from mappnb.capture.activations.facts import model_facts
from mappnb.capture.activations.rotary_watch import RotaryWatch, has_rotary
from mappnb.capture.activations.tap import Site, Tap
from mappnb.capture.activations.tap_forms import BatchFirst, ColumnPart, Experts, Form, FusedHeads
from mappnb.capture.activations.taps_megatron import Place
from mappnb.errors import CaptureError, did_you_mean

__all__ = ["inner_model", "taps_of", "weights_of"]

STYLES: Final = ("hf", "gpt2")
PREFERS_LAST: Final = frozenset(("q", "k", "mlp_out"))  # q_norm after q_proj; the MLP of experts has no down_proj


def inner_model(model: Any) -> Any:
    """Return the model inside wrappers that call it ``module``."""
    while len(list(model.children())) == 1 and hasattr(model, "module"):
        model = model.module
    return model


def taps_of(model: Any, missing: list[str], *, names: Mapping[str, str] | None = None) -> list[Tap]:
    """Return the taps of all points that are known in a model, in the order of a forward pass.

    Parameters
    ----------
    model
        A torch module.
    missing : list
        Gets one line for each point that exists in the model but passes no module.
    names : mapping, optional
        Point -> module path, ``*`` for the layer, ``.input`` for what enters the module.

    Raises
    ------
    CaptureError
        If ``names`` names a point or a module that does not exist.
    """
    core = inner_model(model)
    return _Finder(core, missing).by_names(names) if names is not None else _Finder(core, missing).by_style()


class _Finder:
    """Finds modules by pattern, and makes taps of them."""

    def __init__(self, core: Any, missing: list[str]) -> None:
        self.core, self._missing = core, missing
        self.modules = dict(core.named_modules())
        self.facts = model_facts(core)
        self.place = place_of(self.facts)

    def by_names(self, names: Mapping[str, str]) -> list[Tap]:
        """Taps by given names."""
        for point in names:
            if point not in POINTS:
                raise CaptureError(
                    f"names: unknown point {point!r}; known: {', '.join(POINTS)}{did_you_mean(point, POINTS)}"
                )
        taps = [tap for point, pattern in names.items() for tap in self._tap(point, (pattern,), strict=True)]
        return _in_order(taps)

    def by_style(self) -> list[Tap]:
        """Taps by the names of the style whose layers the model has."""
        for style in STYLES:
            patterns = module_names(style)
            for root in self._roots(patterns["resid_post"][0]):
                table = {p: tuple(_strip(n, root) for n in found) for p, found in patterns.items()}
                taps = [tap for point, found in table.items() for tap in self._tap(point, found)]
                return _in_order([*taps, *self._fused_mlp(table), *self._heads(table, style)])
        self._missing.append("resid_post: no layers as in Hugging Face's Llama or GPT-2; tell where they are by names=")
        return []

    def _roots(self, layers: str) -> Iterator[str]:
        """Prefix that the model lacks: ``"model."`` for a Llama without head; nothing for one with it."""
        for root in ("", layers.split(".", maxsplit=1)[0] + "."):
            if self._layers(_strip(layers, root)):
                yield root

    def _layers(self, pattern: str) -> list[int]:
        path = pattern.removesuffix(".input").removesuffix(".output")
        if "*" not in path:
            return [-1] if path in self.modules else []
        numbers: list[int] = []
        while path.replace("*", str(len(numbers)), 1) in self.modules:
            numbers.append(len(numbers))
        return numbers

    def _tap(self, point: str, patterns: tuple[str, ...], *, strict: bool = False) -> Iterator[Tap]:
        """Taps of one point: at each layer, the module of the first pattern that exists."""
        ordered = reversed(patterns) if point in PREFERS_LAST else patterns
        for pattern in ordered:
            numbers = self._layers(pattern)
            if numbers:
                for number in numbers:
                    site = self._site(pattern, number)
                    if (form := self._form(point)) is not None:
                        yield self._make(point, number, site, form)
                return
        if strict:
            near = did_you_mean(patterns[0], [name.replace(".0", ".*") for name in self.modules])
            raise CaptureError(f"names: no module {patterns[0]!r} for point {point!r}{near}")

    def _site(self, pattern: str, number: int) -> Site:
        path = pattern.replace("*", str(number), 1)
        module = self.modules[path.removesuffix(".input").removesuffix(".output")]
        if not path.endswith(".input"):
            return Site(module, "out", 0)
        first = next(iter(inspect.signature(module.forward).parameters), "input")
        return Site(module, "in", 0, first)

    def _make(self, point: str, layer: int, site: Site, form: Form) -> Tap:
        dims = POINTS[point].dims
        known = {"head": self.place.heads, "kv_head": self.place.kv_heads, "head_dim": self.place.head_dim}
        known |= {"hidden": self.place.hidden, "expert": self.place.experts}
        known |= {"neuron": int(self.facts.get("ffn") or 0), "vocab": int(self.facts.get("vocab") or 0)}
        sizes = tuple(known[dim] or _width(site) or (self._hidden() if dim == "hidden" else 0) for dim in dims)
        return Tap(point, layer, self.place.shard(point, sizes), site, form, replaceable=point != "resid_mid")

    def _hidden(self) -> int:
        """Width of the embedding, where no configuration tells."""
        return next((int(m.embedding_dim) for m in self.modules.values() if hasattr(m, "embedding_dim")), 0)

    def _form(self, point: str) -> Form | None:
        dims = POINTS[point].dims
        if dims == ("expert",):
            return Experts(batch_first=True)
        if "head_dim" not in dims:
            return BatchFirst()
        if not self.place.head_dim:
            self._missing.append(f"{point}: the model's config tells neither num_attention_heads nor head_dim")
            return None
        return BatchFirst(self.place.head_dim)

    def _fused_mlp(self, table: Mapping[str, tuple[str, ...]]) -> Iterator[Tap]:
        """Gate and linear part from one module, as in Phi-3."""
        pattern = f"{_block(table)}.mlp.gate_up_proj"
        for number in self._layers(pattern):
            for index, point in enumerate(("mlp_gate", "mlp_up")):
                yield self._make(point, number, self._site(pattern, number), ColumnPart(index, 2, BatchFirst()))

    def _heads(self, table: Mapping[str, tuple[str, ...]], style: str) -> Iterator[Tap]:
        """Tap queries, keys and values that a fused module gives, and queries and keys after rotary."""
        heads, groups, size = self.place.heads, self.place.kv_heads, self.place.head_dim
        if not size:
            return
        bounds = {"q": (0, heads), "k": (heads, heads + groups), "v": (heads + groups, heads + 2 * groups)}
        attention = "attn" if style == "gpt2" else "self_attn"
        rotates = bool(self.facts.get("rotary"))
        for fused in (f"{_block(table)}.{attention}.c_attn", f"{_block(table)}.{attention}.qkv_proj"):
            for number in self._layers(fused):
                for part, (start, stop) in bounds.items():
                    form = FusedHeads(start, stop, size)
                    points = [part] if part == "v" or rotates else [part, f"{part}_rot"]
                    for point in points:
                        yield self._make(point, number, self._site(fused, number), form)
        if rotates:
            yield from self._rotated(f"{_block(table)}.{attention}")

    def _rotated(self, pattern: str) -> Iterator[Tap]:
        for number in self._layers(pattern):
            module = self.modules[pattern.replace("*", str(number), 1)]
            if not has_rotary(module):
                self._missing += [
                    f"layers.{number}.{p}: {type(module).__name__} rotates inside its forward"
                    for p in ("q_rot", "k_rot")
                ]
                continue
            for index, point in enumerate(("q_rot", "k_rot")):
                site = Site(module, "call", index, watch=RotaryWatch(module, index))
                yield self._make(point, number, site, BatchFirst(self.place.head_dim, heads_first=True))


def place_of(facts: Mapping[str, Any]) -> Place:
    """Return the place of the only rank."""
    heads = int(facts.get("num_heads") or 0)
    return Place(
        tp_rank=0,
        tp_size=1,
        cp_size=1,
        sequence_parallel=False,
        hidden=int(facts.get("hidden") or 0),
        heads=heads,
        kv_heads=int(facts.get("num_kv_heads") or heads),
        head_dim=int(facts.get("head_dim") or 0),
        experts=int(facts.get("num_experts") or 0),
    )


def weights_of(model: Any) -> tuple[Place, list[tuple[str, int, Any]]]:
    """Return the place, and (weight point, layer, tensor in canonical dims) of each weight point of a model."""
    finder = _Finder(inner_model(model), [])
    place, found = finder.place, list[tuple[str, int, Any]]()
    for tap in finder.by_style():
        module, point = tap.site.module, tap.point
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if point == "logits":
            found.append(("unembed", -1, weight))
        elif point == "final_ln":
            found += [("final_ln_weight", -1, weight), ("final_ln_bias", -1, bias)]
        elif point == "z" and weight is not None:
            found.append(("w_o", tap.layer, _by_input(module).unflatten(0, (-1, place.head_dim))))
            found.append(("b_o", tap.layer, bias))
        elif point == "mlp_act" and weight is not None and tap.site.side == "in":
            found.append(("w_out", tap.layer, _by_input(module)))
    return place, found


def _by_input(module: Any) -> Any:
    """Return the weight of a linear layer, dims (input, output): GPT-2's Conv1D has it so already."""
    weight = module.weight.detach()
    return weight if type(module).__name__ == "Conv1D" else weight.t()


def _width(site: Site) -> int:
    """Length of the last dim of what passes a linear layer, an embedding or a norm; 0 for others."""
    module = site.module
    if isinstance(shape := getattr(module, "normalized_shape", None), tuple):
        return int(shape[-1])
    names = ("out_features", "embedding_dim", "nf") if site.side == "out" else ("in_features", "nx")
    return next((int(getattr(module, name)) for name in names if hasattr(module, name)), 0)


def _block(table: Mapping[str, tuple[str, ...]]) -> str:
    return table["resid_post"][0]


def _strip(pattern: str, root: str) -> str:
    return pattern.removeprefix(root) if root else pattern


def _in_order(taps: list[Tap]) -> list[Tap]:
    order = {point: n for n, point in enumerate(POINTS)}
    last = max((tap.layer for tap in taps), default=0) + 1
    where = {"embed": -1, "final_ln": last, "logits": last}
    return sorted(taps, key=lambda tap: (where.get(tap.point, tap.layer), order[tap.point]))
