"""Where captured tensors go: the training thread selects and copies, a thread of its own packs and writes.

Nothing here raises into training. A sink that fails turns itself off, tells why once, and training and traces go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from mappnb.capture.activations.copies import Copies
from mappnb.capture.activations.encode import dtype_name, encode, is_slow, storable
from mappnb.capture.activations.last_stats import LastStats
from mappnb.capture.activations.microbatch import Microbatch
from mappnb.capture.activations.pieces import Pending, Piece, StatsOfStep, TokensOf, WeightPiece
from mappnb.capture.activations.plan import CapturePlan
from mappnb.capture.activations.queue import ByteQueue
from mappnb.capture.activations.selected import Streams, Target
from mappnb.capture.activations.shard import Shard
from mappnb.capture.activations.sink_thread import SinkThread, written

__all__ = ["ActivationSink"]

ITEM_BYTES: Final = 1024
"""What a waiting tensor, or the statistics of one, needs beside its numbers: many small ones would not be bounded otherwise."""


class ActivationSink:
    """Takes the tensors of a plan on one rank and writes them as blocks.

    Parameters
    ----------
    plan : CapturePlan
        Its rules, by number, are the streams.
    meta : mapping
        ``rank``, ``coords``, ``layout``, ``model`` (facts), kept as attributes of each block; looked at when a block is opened.
    folder : callable
        Returns the rank's folder ``.../activations/rank=00017``, or None as long as it is not known.
    fail : callable, optional
        ``fail(where, error)``, called once when the sink turns itself off; it may be called from another thread.
    tell : callable, optional
        Called with the counters as keywords whenever a block is closed, and at the end: see :attr:`counters`.
    join_s : float
        How long the blocks of small steps are joined.

    Notes
    -----
    Calls come from the training thread: `begin`, then `put` for each tensor, `end_step` at the end. Everything else happens in the
    thread ``mappnb-activations``.
    """

    def __init__(
        self,
        plan: CapturePlan,
        meta: Mapping[str, Any],
        folder: Callable[[], str | Path | None],
        fail: Callable[[str, BaseException], object] | None = None,
        *,
        tell: Callable[..., object] | None = None,
        join_s: float = 30.0,
    ) -> None:
        self.plan = plan
        self._fail, self._off = fail, False
        self.reason = ""
        self._queue = ByteQueue(plan.queue_bytes, plan.policy)
        self._copies = Copies(plan.queue_bytes // 2)
        self._streams = Streams(plan, meta)
        self._thread = SinkThread(
            plan, meta, folder, self._queue, self._copies, fail=self.fail, counts=self._counts, tell=tell, join_s=join_s
        )
        self._dropped: dict[str, int] = {}
        self._thinned: dict[str, int] = {}
        self._missed: dict[str, str] = {}
        self._now: Microbatch | None = None
        self._tokens: dict[tuple[int, int], TokensOf | None] = {}
        self._skip: dict[tuple[int, int], bool] = {}
        self._seen = 0
        self._stats: dict[int, StatsOfStep] = {}
        self._last = LastStats()
        self._halves: dict[tuple[int, int], tuple[Microbatch, Target, Any]] = {}

    @property
    def on(self) -> bool:
        """True until the sink is closed or has failed."""
        return not self._off

    @property
    def counters(self) -> dict[str, Any]:
        """What was written and left out so far.

        Returns
        -------
        dict
            ``written_bytes`` (of closed blocks), ``raw_bytes`` (before compression), ``blocks``, ``waited_s`` (of the training thread),
            ``dropped`` and ``thinned`` (tensors, by stream), ``missed`` (what a stream could not take, and why).
        """
        return {**written(self._thread.files), **self._counts()}

    def _counts(self) -> dict[str, Any]:
        return {
            "waited_s": round(self._queue.waited_s, 6),
            "dropped": dict(self._dropped),
            "thinned": dict(self._thinned),
            "missed": dict(self._missed),
        }

    def fail(self, where: str, err: BaseException) -> None:
        """Turn the sink off for good."""
        self._off = True
        if self.reason:
            return
        self.reason = f"{where}: {type(err).__name__}: {err}"
        self._queue.close(discard=True)
        self._tokens, self._stats, self._halves, self._now = {}, {}, {}, None
        if self._fail is not None:
            self._fail(where, err)

    def begin(self, info: Microbatch) -> None:
        """Tell whose tensors come now; tensors of gradients tell themselves (``info`` of :meth:`put`)."""
        self._now = info
        self._last.forget()

    def put(
        self, rule_index: int, tap: Any, tensor: Any, grad: bool = False, *, info: Microbatch | None = None
    ) -> None:
        """Take a tensor: select, pack or copy, and queue it.

        Parameters
        ----------
        rule_index : int
            Which rule of the plan, and so which stream.
        tap : Tap
            Which point it is, and which part of it.
        tensor : Tensor, dims (sample, token, features...)
            The rank's part; looked at before this returns.
        grad : bool
            It is the gradient of the point.
        info : Microbatch, optional
            Whose it is; default the one that began last.
        """
        if self._off:
            return
        try:
            now = info or self._now
            target = self._streams.target(rule_index, tap, grad)
            if now is None or not target.wanted or self._left_out(target.stream, now):
                return
            self._take(rule_index, target, tensor, now)
        except Exception as err:  # noqa: BLE001 (capture never kills training)
            self.fail(f"capture of {getattr(tap, 'name', tap)}", err)

    def _left_out(self, stream: str, now: Microbatch) -> bool:
        if self.plan.policy != "thin":
            return False
        key = (now.step, now.microbatch)
        if key not in self._skip:
            self._skip[key] = self._queue.skips(self._seen)
            self._seen += 1
        if self._skip[key]:
            self._thinned[stream] = self._thinned.get(stream, 0) + 1
        return self._skip[key]

    def _take(self, rule_index: int, target: Target, passed: Any, now: Microbatch) -> None:
        tokens = self._tokens_of(rule_index, target, now)
        whole = passed.detach()
        if target.mode == "heads":
            self._take_heads(rule_index, target, whole, now)
            return
        tensor = target.select(storable(whole), now)
        if tensor.numel() == 0:
            return
        if target.mode == "stats":
            self._take_stats(rule_index, target, passed if tensor is whole else tensor, now.step)
            return
        if target.sequence_parallel and tokens.slots_sp is None:
            tokens.slots_sp = target.slots(now)
        attrs = target.attrs(dtype_name(tensor), tensor.shape[-1])
        pack: Mapping[str, Any] | None = None
        if is_slow(target.mode) and tensor.device.type == "cpu":
            pack, parts = target.numpy_options, {"": tensor}
        else:
            parts = encode(target.mode, tensor, target.options, start=target.start)
        self._queue_piece(target, target.name, tokens, parts, target.packed_dims, attrs, pack)

    def _queue_piece(
        self,
        target: Target,
        name: str,
        tokens: TokensOf,
        parts: Mapping[str, Any],
        dims: tuple[str, ...],
        attrs: Mapping[str, Any],
        pack: Mapping[str, Any] | None = None,
    ) -> None:
        size = ITEM_BYTES + sum(t.numel() * t.element_size() for t in parts.values())
        if self._queue.policy != "block" and self._queue.is_full(size):
            self._drop(target.stream)
            return
        copied = {part: Pending(*self._copies.copy(t)) for part, t in parts.items()}
        piece = Piece(target.stream, name, target.layer, tokens, copied, dims, attrs, pack)
        if not self._queue.put(piece, size):
            self._drop(target.stream)

    def _drop(self, stream: str) -> None:
        if not self._off:
            self._dropped[stream] = self._dropped.get(stream, 0) + 1

    def _tokens_of(self, rule_index: int, target: Target, now: Microbatch) -> TokensOf:
        key = (rule_index, id(now))
        found = self._tokens.get(key)
        if found is None or found.of is not now:
            found = self._tokens[key] = self._streams.tokens_of(rule_index, now, self._copies)
        return found

    def _take_stats(self, rule_index: int, target: Target, tensor: Any, step: int) -> None:
        stats = self._stats.get(rule_index)
        if stats is None:
            stats = self._stats[rule_index] = StatsOfStep(target.stream, step)
        row = self._last.of(tensor)
        stats.rows.setdefault((target.name, target.layer), []).append(row)
        stats.shards.setdefault(target.name, target.shard_dict)

    def _take_heads(self, rule_index: int, target: Target, tensor: Any, now: Microbatch) -> None:
        """Keep queries until the keys of the same layer come (or keys until queries), then take the statistics of the heads."""
        from mappnb.capture.activations.head_stats import head_statistics

        key = (rule_index, target.layer)
        first = self._halves.pop(key, None)
        if first is None or first[0] is not now or first[1].point == target.point:
            self._halves[key] = (now, target, tensor)
            return
        pair = [first[1:], (target, tensor)]
        (query, q), (_, k) = pair if first[1].point == "q_rot" else pair[::-1]
        if target.shard.token != "whole":
            self._missed[target.stream] = "head statistics need all tokens; context parallelism splits them"
            return
        facts = self._streams.facts
        found = head_statistics(
            q,
            k,
            now.token_ids,
            facts,
            layer=target.layer,
            head_start=query.start_of("head"),
            mask=now.mask,
            sinks=query.sinks,
        )
        tokens = self._tokens_of(rule_index, query, now)
        for name, all_heads in found.items():
            values = query.select_heads(all_heads)
            if values.numel():
                attrs = query.attrs("float32", values.shape[-1])
                self._queue_piece(query, name, tokens, {"": values.float()}, ("head",), attrs)

    def end_step(self, step: int) -> None:
        """Tell that all tensors of a step have come."""
        if self._off:
            return
        try:
            for stats in self._stats.values():
                rows = sum(map(len, stats.rows.values()))
                if rows and not self._queue.put(self._on_host(stats), rows * ITEM_BYTES):
                    self._drop(stats.stream)
            self._queue.put(("end_step", step))
        except Exception as err:  # noqa: BLE001
            self.fail("end of step", err)
        self._stats, self._tokens, self._skip, self._halves, self._now = {}, {}, {}, {}, None
        self._last.forget()

    def _on_host(self, stats: StatsOfStep) -> StatsOfStep:
        """Have rows that are on a GPU copied from there, without waiting for them."""
        places = [(rows, i) for rows in stats.rows.values() for i, row in enumerate(rows) if not isinstance(row, tuple)]
        if places:
            import torch

            copy, event = self._copies.copy(torch.stack([rows[i] for rows, i in places]))
            for number, (rows, i) in enumerate(places):
                rows[i] = Pending(copy[number], event, reusable=False)
        return stats

    def weights(self, step: int, name: str, layer: int, tensor: Any, shard: Shard, *, dtype: str = "") -> None:
        """Take this rank's part of a parameter: ``name`` without layer; ``dtype`` to cast it to."""
        if self._off or not shard.writes:
            return
        try:
            tensor = tensor.detach()
            if dtype:
                tensor = encode("cast", tensor, {"dtype": dtype})[""]
            attrs = {"mode": "cast" if dtype else "full", "dtype": dtype_name(tensor), "shard": shard.to_dict()}
            values = Pending(*self._copies.copy(tensor))
            piece = WeightPiece(step, name, layer, values, shard.features, attrs)
            if not self._queue.put(piece, ITEM_BYTES + tensor.numel() * tensor.element_size()):
                self._drop("weights")
        except Exception as err:  # noqa: BLE001
            self.fail(f"weights {name}", err)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write what is left and end the thread; returns False if it did not end in time."""
        self._off = True
        self._queue.close()
        ended = self._thread.end(timeout_s)
        if not ended:
            self.fail("end of recording", TimeoutError(f"the writer did not end within {timeout_s:g} s"))
        return ended
