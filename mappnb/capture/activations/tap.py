"""Taps: where the points of a model pass its modules, and the hooks that look at them or put others in their place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from mappnb.activation_points import PointName
from mappnb.capture.activations.shard import Shard
from mappnb.capture.activations.tap_forms import Form
from mappnb.errors import CaptureError

__all__ = ["Attachment", "Handler", "Site", "Tap", "attached"]

Handler = Callable[["Tap", Any], Any]
"""Gets a tap and its canonical local tensor, dims (sample, token, features...); returns None, or another tensor of the same shape."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor passes a module.

    Attributes
    ----------
    module
        The ``torch.nn.Module``, or whatever ``watch`` watches.
    side : str
        ``"in"``: among its arguments; ``"out"``: among its results; ``"call"``: ``watch`` tells of it.
    index : int
        Number of the argument, or of the result in a tuple; -1 for a result that is no tuple.
    keyword : str
        Name of the argument.
    bias : int
        Number of the result that is to be added to it, -1 for none.
    watch : callable, optional
        Called with a function that gets and may return a tensor; returns what takes it off. For tensors that pass no module.
    """

    module: Any
    side: Literal["in", "out", "call"]
    index: int = 0
    keyword: str = ""
    bias: int = -1
    watch: Callable[[Callable[[Any], Any]], Callable[[], None]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """One point of one layer, as this rank has it.

    Attributes
    ----------
    point : str
        Canonical name, a key of `mappnb.activation_points.POINTS`.
    layer : int
        Global layer, -1 for points that no layer holds.
    shard : Shard
        Which part of the whole tensor passes here.
    site : Site
        Where.
    form : Form
        How it becomes the canonical tensor.
    grad : bool
        True for the gradient of the point.
    chunk : int
        Model chunk of this rank.
    compute : callable, optional
        For a point that passes nowhere: makes it from the tensor at the site. It has no gradient, and cannot be replaced.
    replaceable : bool
        False where the model keeps another reference to the tensor, which a replacement would not reach.
    """

    point: str
    layer: int
    shard: Shard
    site: Site
    form: Form
    grad: bool = False
    chunk: int = 0
    compute: Callable[[Any], Any] | None = None
    replaceable: bool = True

    @property
    def name(self) -> str:
        """Full name, such as ``"layers.3.q"`` or ``"logits.grad"``."""
        return str(PointName(self.point, self.layer, self.grad))

    def __repr__(self) -> str:
        return f"Tap({self.name})"


def attached(taps: Iterable[Tap], handler: Handler, *, bind: Callable[[], Handler] | None = None) -> Attachment:
    """Call ``handler`` whenever a tap's tensor passes, until the end of the ``with``.

    Parameters
    ----------
    taps : iterable of Tap
        From `find_taps`.
    handler : callable
        ``handler(tap, tensor)``: the tensor is canonical and local, dims (sample, token, features...), and often a view: the model
        may reuse or change its memory, so copy what is to stay. It returns None to look, or a tensor of the same shape to put in its
        place; gradients flow through it.
    bind : callable, optional
        Called in the forward pass for each gradient tap; its result is the handler of that gradient. Default: ``handler``.

    Returns
    -------
    Attachment
        A context manager; ``remove()`` does the same by hand.

    Notes
    -----
    Adds no collective. What a backward pass computes again (activation checkpointing) is not reported, but gradients are: their
    hooks are put on the tensors that backward goes through. Exceptions of the handler pass into the program.
    """
    return Attachment(taps, handler, bind)


@dataclass
class Attachment:
    """Hooks of `attached`; they are on at once."""

    taps: Iterable[Tap]
    handler: Handler
    bind: Callable[[], Handler] | None = None
    _removes: list[Callable[[], None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Put the hooks on: one for all taps at a place."""
        import torch

        self._graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self._grad_enabled = torch.is_grad_enabled
        places: OrderedDict[tuple[int, str, Any], list[Tap]] = OrderedDict()
        for tap in self.taps:
            key = (id(tap.site.module), tap.site.side, tap.site.watch)
            places.setdefault(key, []).append(tap)
        try:
            for group in places.values():
                self._removes.append(self._put(sorted(group, key=lambda tap: tap.grad)))
        except BaseException:
            self.remove()
            raise

    def _put(self, taps: list[Tap]) -> Callable[[], None]:
        site = taps[0].site
        remove: Callable[[], None]
        if site.side == "in":
            remove = site.module.register_forward_pre_hook(self._before(taps), with_kwargs=True).remove
        elif site.side == "out":
            remove = site.module.register_forward_hook(self._after(taps)).remove
        elif site.watch is not None:
            remove = site.watch(self._called(taps))
        else:
            raise CaptureError(f"tap {taps[0].name}: nothing watches its calls")
        return remove

    def _before(self, taps: list[Tap]) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            again, changed = self._graph_task() != -1, False
            for tap in taps:
                index, keyword = tap.site.index, tap.site.keyword
                by_place = len(args) > index
                raw = args[index] if by_place else kwargs.get(keyword)
                new = None if raw is None else self._see(tap, raw, None, args, again)
                if new is None:
                    continue
                changed = True
                if by_place:
                    args = (*args[:index], new, *args[index + 1 :])
                else:
                    kwargs = {**kwargs, keyword: new}
            return (args, kwargs) if changed else None

        return hook

    def _after(self, taps: list[Tap]) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> Any:
            again, changed = self._graph_task() != -1, False
            for tap in taps:
                index, at = tap.site.index, tap.site.bias
                whole = index < 0 or not isinstance(output, (tuple, list))
                raw = output if whole else output[index]
                bias = output[at] if at >= 0 and not whole and len(output) > at else None
                new = None if raw is None else self._see(tap, raw, bias, args, again)
                if new is None:
                    continue
                changed = True
                output = new if whole else _with(output, index, new, at if bias is not None else -1)
            return output if changed else None

        return hook

    def _called(self, taps: list[Tap]) -> Callable[[Any], Any]:
        def see(raw: Any) -> Any:
            again = self._graph_task() != -1
            for tap in taps:
                new = self._see(tap, raw, None, (), again)
                raw = raw if new is None else new
            return raw

        return see

    def _see(self, tap: Tap, raw: Any, bias: Any, args: tuple[Any, ...], again: bool) -> Any:
        """Show a tensor to the handler; returns what to put in its place, or None."""
        form = tap.form
        if tap.grad:
            if raw.requires_grad and self._grad_enabled():
                handler = self.handler if self.bind is None else self.bind()
                raw.register_hook(_on_gradient(tap, form.hint(args), handler))
            return None
        if again:
            return None
        hint = form.hint(args)
        value = form.view(raw if tap.compute is None else tap.compute(raw), hint)
        if bias is not None:
            value = value + form.of_bias(bias)
        new = self.handler(tap, value)
        if new is None:
            return None
        if tap.compute is not None or not tap.replaceable:
            raise CaptureError(
                f"tap {tap.name}: in this model it can be looked at, not replaced: no module gets or gives it alone; replace resid_pre, "
                f"attn_out, mlp_out or resid_post instead"
            )
        return form.back(raw if bias is None else raw + bias, new, hint)

    def remove(self) -> None:
        """Take all hooks off; gradients whose forward has passed are still reported."""
        while self._removes:
            self._removes.pop()()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


def _with(output: Any, index: int, new: Any, bias: int) -> Any:
    """Return results with one replaced; its bias is in it already, so that becomes zeros."""
    items = list(output)
    items[index] = new
    if bias >= 0:
        items[bias] = items[bias].new_zeros(items[bias].shape)
    return type(output)(items)


def _on_gradient(tap: Tap, hint: Any, handler: Handler) -> Callable[[Any], Any]:
    def on_gradient(grad: Any) -> Any:
        new = handler(tap, tap.form.view(grad, hint))
        return None if new is None else tap.form.back(grad, new, hint)

    return on_gradient
