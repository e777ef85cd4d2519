"""The sink: what is put comes back from the files; policies, failures, kills, other shapes, sharded selections."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from mappnb import activation_stats  # noqa: E402
from mappnb.activation_blocks import LOG_NAME, open_block, read_log  # noqa: E402
from mappnb.activation_codecs import PARTS, decode, part_name, sketch_matrix  # noqa: E402
from mappnb.activation_stats import describe, tensor_stats_reference  # noqa: E402
from mappnb.capture.activations import block_files, sink_thread  # noqa: E402
from mappnb.capture.activations.microbatch import Microbatch, zigzag  # noqa: E402
from mappnb.capture.activations.plan import Capture, CapturePlan  # noqa: E402
from mappnb.capture.activations.selection import TokenSample  # noqa: E402
from mappnb.capture.activations.shard import Shard, Split  # noqa: E402
from mappnb.capture.activations.sink import ITEM_BYTES, ActivationSink  # noqa: E402

FACTS = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "causal": True}
META = {"rank": 3, "coords": {"tp_rank": 0}, "layout": {"tp": 1}, "model": FACTS}
HIDDEN = Shard(("sample", "token", "hidden"), (16,))


def tap(point="resid_post", layer=0, shard=HIDDEN):
    return SimpleNamespace(point=point, layer=layer, shard=shard, name=f"layers.{layer}.{point}")


def microbatch(step=0, number=0, *, batch=2, tokens=8, slots=None, chunk=0, **more):
    slots = np.arange(tokens) if slots is None else slots
    return Microbatch(step, chunk, number, 0, batch, slots, tokens, **more)


class Recording:
    """A sink into a folder, and what it says."""

    def __init__(self, folder, *rules, meta=META, join_s=30.0, **options):
        self.folder, self.failures, self.told = folder, [], []
        self.sink = ActivationSink(
            CapturePlan(*rules, **options),
            meta,
            lambda: folder,
            lambda where, err: self.failures.append((where, err)),
            tell=lambda **counters: self.told.append(counters),
            join_s=join_s,
        )

    def close(self):
        assert self.sink.close(20)
        return self

    @property
    def files(self):
        return sorted(p.name for p in self.folder.glob("*.zip"))

    @property
    def log(self):
        return read_log((self.folder / LOG_NAME).read_bytes())

    def block(self, number=0):
        return open_block(self.folder / self.files[number])


def read(block, stream, name):
    info = block.streams[stream][name]
    mode = info.attrs["mode"]
    parts = {p: block.array(stream, part_name(name, p))[...] for p in PARTS[mode]}
    return decode(mode, parts, info.attrs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_full_comes_back_bit_for_bit(tmp_path, dtype):
    run = Recording(tmp_path / "rank=00003", Capture("resid_post", name="all"))
    kept = {}
    for step in (0, 1):
        for number in (0, 1):
            ids = torch.arange(16).view(2, 8) + 100 * number
            run.sink.begin(
                microbatch(step, number, token_ids=ids, positions=torch.arange(8).expand(2, 8), mask=ids > 3)
            )
            for layer in (2, 0, 3):
                x = torch.randn(8, 2, 16).to(dtype)
                run.sink.put(0, tap(layer=layer), x.transpose(0, 1))  # a view, as Megatron's layout gives
                kept[step, number, layer] = x.transpose(0, 1).clone()
                x.zero_()  # the program uses its memory again
            ids.zero_()
        run.sink.end_step(step)
    run.close()
    assert run.failures == [] and run.files == ["block-000000.zarr.zip"]
    with run.block() as block:
        info = block.streams["all"]["resid_post"]
        assert info.dims == ("sample", "layer", "token", "hidden") and info.attrs["layers"] == [2, 0, 3]
        assert info.attrs["shard"] == HIDDEN.to_dict() and info.attrs["token_index"] == "token_index"
        table = block.samples("all")
        values = read(block, "all", "resid_post")
        for row in range(8):
            step, number, index = (int(table[c][row]) for c in ("step", "microbatch", "index"))
            for place, layer in enumerate((2, 0, 3)):
                want = kept[step, number, layer][index]
                np.testing.assert_array_equal(
                    values[row, place], want.float().numpy() if dtype == torch.bfloat16 else want
                )
            np.testing.assert_array_equal(table["token_id"][row], np.arange(8) + 8 * index + 100 * number)
        assert table["mask"].sum() == 56 and table["position"].max() == 7
        assert block.array("all", "resid_post_present")[...].all()
        assert {"rank": 3, "model": FACTS}.items() <= block.attrs.items()
        assert CapturePlan.from_dict(block.attrs["plan"]) == run.sink.plan
    entry = run.log[0]
    assert entry["steps"] == [0, 1] and entry["samples"] == {"all": 8} and entry["streams"] == {"all": ["resid_post"]}
    assert run.told[-1]["written_bytes"] == entry["bytes"] == (tmp_path / "rank=00003" / entry["file"]).stat().st_size


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool])
def test_other_numbers_become_float32(tmp_path, dtype):
    run = Recording(tmp_path, Capture("resid_post"), Capture("resid_post", mode="stats"))
    x = torch.randint(0, 2, (2, 8, 16)).to(dtype)
    run.sink.begin(microbatch())
    run.sink.put(0, tap(), x)
    run.sink.put(1, tap(), x)
    run.sink.end_step(0)
    run.close()
    assert run.failures == []
    with run.block() as block:
        np.testing.assert_array_equal(read(block, "full", "resid_post")[:, 0], x.float().numpy())
        assert block.array("stats", "resid_post")[0, 0, 1] == pytest.approx(x.float().mean().item())


def test_modes_come_back_within_their_errors(tmp_path):
    rules = [
        Capture("resid_post", mode="cast", dtype="float16"),
        Capture("resid_post", mode="int8"),
        Capture("resid_post", mode="topk", k=3),
        Capture("resid_post", mode="bucket", size=5),
        Capture("resid_post", mode="bucket", size=5, reduce="max", name="largest"),
        Capture("resid_post", mode="sketch", size=64, seed=7),
    ]
    run = Recording(tmp_path, *rules)
    x = torch.randn(2, 8, 16)
    x[0, 0, 0], x[0, 1, 2] = torch.nan, torch.inf
    run.sink.begin(microbatch())
    for i in range(len(rules)):
        run.sink.put(i, tap(), x)
    run.sink.end_step(0)
    run.close()
    n = x.numpy()
    with run.block() as block:
        got = {s: read(block, s, "resid_post")[:, 0] for s in block.streams}
    np.testing.assert_array_equal(got["cast"], n.astype(np.float16))
    finite = np.isfinite(n)
    step = np.abs(np.where(finite, n, 0)).max(-1, keepdims=True) / 127
    assert (np.abs(got["int8"] - n)[finite] <= (np.broadcast_to(step, n.shape) * 0.501)[finite]).all()
    assert np.isnan(got["int8"][~finite]).all()
    order = np.sort(np.abs(n[1]), axis=-1)
    kept = got["topk"][1]
    np.testing.assert_array_equal(kept, np.where(np.abs(n[1]) >= order[:, -3:-2], n[1], 0))
    means = np.stack([n[..., i : i + 5].mean(-1) for i in (0, 5, 10, 15)], -1)
    np.testing.assert_allclose(got["bucket"], means, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["largest"], np.stack([n[..., i : i + 5].max(-1) for i in (0, 5, 10, 15)], -1))
    np.testing.assert_allclose(got["sketch"][1], n[1] @ sketch_matrix(64, 7, 0, 16), rtol=1e-4, atol=1e-5)


def test_statistics_of_a_step_are_those_of_all_its_microbatches(tmp_path, rng):
    run = Recording(tmp_path, Capture(["resid_post", "final_ln"], mode="stats"))
    kept = {}
    for step in (4, 5):
        for number in range(3):
            run.sink.begin(microbatch(step, number))
            for layer in (0, 1):
                x = rng.standard_normal((2, 8, 16)).astype(np.float32) * (layer + 1) + step
                x[0, 0, :2] = np.nan, np.inf
                run.sink.put(0, tap(layer=layer), torch.from_numpy(x))
                kept.setdefault((step, layer), []).append(x)
            run.sink.put(0, tap("final_ln", -1), torch.zeros(2, 8, 16))
        run.sink.end_step(step)
    run.close()
    with run.block() as block:
        fields, counts = (block.array("stats", n)[...] for n in ("resid_post", "resid_post_histogram"))
        steps = block.array("stats", "step")[...].tolist()
        assert block.streams["stats"]["resid_post"].attrs["layers"] == [0, 1]
        assert block.streams["stats"]["final_ln"].dims == ("step", "field")
        assert describe(block.array("stats", "final_ln")[...])["sparsity"].tolist() == [1, 1]
    assert steps == [4, 5]
    for (step, layer), tensors in kept.items():
        expected, histogram = tensor_stats_reference(np.stack(tensors))
        np.testing.assert_allclose(fields[steps.index(step), layer], expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(counts[steps.index(step), layer], histogram)


def test_a_stream_that_passes_two_points_is_read_once_in_each_microbatch(tmp_path, monkeypatch):
    read, native = [], activation_stats._core.tensor_stats
    monkeypatch.setattr(
        activation_stats._core, "tensor_stats", lambda rows, *args: read.append(rows.size) or native(rows, *args)
    )
    points = ["resid_pre", "resid_post"]
    run = Recording(tmp_path, Capture(points, mode="stats"), Capture(points, mode="stats", tokens=3, name="some"))
    x = torch.randn(8, 2, 16)
    for step, changes in ((0, False), (1, True)):
        for number in range(2):
            run.sink.begin(microbatch(step, number))
            run.sink.put(0, tap("resid_post"), x.transpose(0, 1))
            if changes:
                x += 1
            run.sink.put(0, tap("resid_pre", 1), x.transpose(0, 1))
            for name in points:
                run.sink.put(1, tap(name), x.transpose(0, 1))
        run.sink.end_step(step)
    run.close()
    assert run.failures == []
    assert read == 2 * [256, 96, 96] + 2 * [256, 256, 96, 96]  # chosen tokens are copies
    with run.block() as block:
        before, after = (block.array("stats", f"{name}")[:, 0, 1] for name in ("resid_post", "resid_pre"))
        np.testing.assert_allclose(after - before, [0, 1], atol=1e-6)


def test_other_lengths_and_batches_share_the_arrays(tmp_path):
    run = Recording(tmp_path, Capture("resid_post"), Capture("resid_post", mode="int8"))
    shapes = [(2, 8), (2, 5), (3, 8), (2, 20), (1, 3)]
    kept = []
    for number, (batch, tokens) in enumerate(shapes):
        x = torch.randn(batch, tokens, 16)
        run.sink.begin(microbatch(0, number, batch=batch, tokens=tokens, token_ids=torch.ones(batch, tokens).long()))
        for layer in (0, 1):
            run.sink.put(0, tap(layer=layer), x + layer)
            run.sink.put(1, tap(layer=layer), x + layer)
        kept.append(x.numpy())
    run.sink.end_step(0)
    run.close()
    assert run.failures == [] and len(run.files) == 1
    with run.block() as block:
        table, values = block.samples("full"), read(block, "full", "resid_post")
        rough = read(block, "int8", "resid_post")
        present = block.array("full", "resid_post_present")[...]
    assert values.shape[2] == 20
    rows = np.flatnonzero(table["step"] >= 0)
    assert [(int(table["microbatch"][r]), int(table["index"][r])) for r in rows] == [
        (n, i) for n, (batch, _) in enumerate(shapes) for i in range(batch)
    ]
    for row in range(len(values)):
        if row not in rows:
            assert not present[row].any() and (table["token_index"][row] == -1).all()
            continue
        x = kept[table["microbatch"][row]][table["index"][row]]
        assert (table["token_index"][row] == np.r_[np.arange(len(x)), np.full(20 - len(x), -1)]).all()
        assert ((table["token_id"][row] == 1) == (table["token_index"][row] >= 0)).all()
        for layer in (0, 1):
            np.testing.assert_array_equal(values[row, layer, : len(x)], x + layer)
            assert (values[row, layer, len(x) :] == 0).all()
            np.testing.assert_allclose(rough[row, layer, : len(x)], x + layer, atol=0.05)
    assert present[rows].all()


def test_another_dtype_or_width_begins_another_block(tmp_path):
    run = Recording(tmp_path, Capture("resid_post"))
    for number, x in enumerate((torch.ones(2, 8, 16), torch.ones(2, 8, 16).half(), torch.ones(2, 8, 4).half())):
        run.sink.begin(microbatch(0, number))
        run.sink.put(0, tap(), x)
    run.sink.end_step(0)
    run.close()
    assert run.failures == []
    forms = [
        (b.streams["full"]["resid_post"].dtype.name, b.streams["full"]["resid_post"].shape)
        for b in map(run.block, range(3))
    ]
    assert forms == [("float32", (2, 1, 8, 16)), ("float16", (2, 1, 8, 16)), ("float16", (2, 1, 8, 4))]


def test_tokens_are_chosen_by_slot_on_a_zigzag_and_sequence_parallel_rank(tmp_path):
    slots = zigzag(16, 1, 2)  # 4..7, 8..11
    split = Shard(("sample", "token", "hidden"), (16,), token="cp+sp", token_rank=1, token_size=2)  # 8..11
    run = Recording(
        tmp_path,
        Capture(["resid_post", "mlp_act"], tokens=[5, 9, 10, 15], name="some"),
        Capture(["resid_post", "mlp_act"], tokens=TokenSample(6, seed=1), name="random"),
        Capture(["resid_post", "mlp_act"], name="every"),
    )
    act = Shard(("sample", "token", "neuron"), (16,), token="cp")
    x = torch.from_numpy(slots).float()[None, :, None].expand(2, 8, 16)
    run.sink.begin(microbatch(tokens=16, slots=slots, token_ids=torch.from_numpy(slots).expand(2, 8) * 10))
    for rule in range(3):
        run.sink.put(rule, tap(shard=split), x[:, 4:])
        run.sink.put(rule, tap("mlp_act", shard=act), x)
    run.sink.end_step(0)
    run.close()
    assert run.failures == []
    random = Capture("resid_post", tokens=TokenSample(6, seed=1)).slots(16, step=0, dp_rank=0, microbatch=0)
    expected = {"some": ([5, 9, 10], [9, 10]), "every": (slots, slots[4:])}
    expected["random"] = tuple([s for s in part if s in random] for part in (slots, slots[4:]))
    with run.block() as block:
        for stream, (whole, part) in expected.items():
            table = block.samples(stream)
            np.testing.assert_array_equal(table["token_index"], np.broadcast_to(whole, (2, len(whole))))
            np.testing.assert_array_equal(table["token_index_sp"], np.broadcast_to(part, (2, len(part))))
            np.testing.assert_array_equal(table["token_id"], table["token_index"] * 10)
            for name, at in (("mlp_act", whole), ("resid_post", part)):
                values = read(block, stream, name)[0, 0, :, 0]
                np.testing.assert_array_equal(values, at)
            assert block.streams[stream]["resid_post"].attrs["token_index"] == "token_index_sp"


def test_heads_are_chosen_by_global_number(tmp_path):
    split = {"head": Split(1, 2, 4, 8, 8)}
    shard = Shard(("sample", "token", "head", "head_dim"), (4, 4), split=split)
    kv = Shard(("sample", "token", "kv_head", "head_dim"), (2, 4), split={"kv_head": Split(1, 2, 2, 4, 4)})
    run = Recording(tmp_path, Capture(["q", "k"], heads=[1, 5, 6]), Capture("q", heads=[0], name="elsewhere"))
    q = torch.arange(4.0)[:, None].expand(2, 8, 4, 4) + 4
    k = torch.arange(2.0)[:, None].expand(2, 8, 2, 4) + 2
    run.sink.begin(microbatch())
    run.sink.put(0, tap("q", shard=shard), q)
    run.sink.put(0, tap("k", shard=kv), k)
    run.sink.put(1, tap("q", shard=shard), q)
    run.sink.end_step(0)
    run.close()
    with run.block() as block:
        assert list(block.streams) == ["full"]
        assert read(block, "full", "q")[0, 0, 0, :, 0].tolist() == [5, 6]
        assert block.streams["full"]["q"].attrs["chosen"] == {"head": [5, 6]}
        assert read(block, "full", "k")[0, 0, 0, :, 0].tolist() == [
            2,
            3,
        ]  # the groups of heads 5 and 6; that of head 1 is elsewhere
        assert block.streams["full"]["k"].attrs["chosen"] == {"kv_head": [2, 3]}


def test_sketches_of_shards_add_up_and_copies_are_written_once(tmp_path):
    x = torch.randn(2, 8, 16)
    total = 0
    for rank in (0, 1):
        split = {"neuron": Split(rank, 2, rank * 8, rank * 8 + 8, 16)}
        shard = Shard(("sample", "token", "neuron"), (8,), split=split)
        copied = Shard(("sample", "token", "hidden"), (16,), replicated=True, writes=rank == 0)
        run = Recording(tmp_path / str(rank), Capture(["mlp_act", "resid_post"], mode="sketch", size=5, seed=2))
        run.sink.begin(microbatch())
        run.sink.put(0, tap("mlp_act", shard=shard), x[..., rank * 8 : rank * 8 + 8])
        run.sink.put(0, tap("resid_post", shard=copied), x)
        run.sink.end_step(0)
        run.close()
        with run.block() as block:
            total = total + read(block, "sketch", "mlp_act")
            assert block.streams["sketch"]["mlp_act"].attrs["combine"] == "sum"
            assert ("resid_post" in block.streams["sketch"]) == (rank == 0)
    np.testing.assert_allclose(total[:, 0], x.numpy() @ sketch_matrix(5, 2, 0, 16), rtol=1e-4, atol=1e-5)


def test_head_statistics_are_those_of_the_function(tmp_path):
    from mappnb.capture.activations.head_stats import head_statistics

    heads = Shard(("sample", "token", "head", "head_dim"), (8, 4))
    kv = Shard(("sample", "token", "kv_head", "head_dim"), (4, 4))
    run = Recording(tmp_path, Capture(["q_rot", "k_rot"], mode="heads", heads=[1, 6]))
    ids = torch.randint(0, 5, (2, 8))
    run.sink.begin(microbatch(token_ids=ids))
    kept = {}
    for layer in (0, 1):
        q, k = torch.randn(2, 8, 8, 4), torch.randn(2, 8, 4, 4)
        run.sink.put(0, tap("q_rot", layer, heads), q)
        run.sink.put(0, tap("k_rot", layer, kv), k)
        kept[layer] = head_statistics(q, k, ids, FACTS, layer=layer)
    run.sink.end_step(0)
    run.close()
    assert run.failures == []
    with run.block() as block:
        assert set(kept[0]) <= set(block.streams["heads"])
        for layer, found in kept.items():
            for name, values in found.items():
                np.testing.assert_array_equal(block.array("heads", name)[:, layer], values[:, [1, 6]].numpy())
        assert block.streams["heads"]["entropy"].attrs["chosen"] == {"head": [1, 6]}


def test_head_statistics_need_all_tokens_and_say_so(tmp_path):
    shards = [Shard(("sample", "token", dim, "head_dim"), (4, 4), token="cp") for dim in ("head", "kv_head")]
    run = Recording(tmp_path, Capture(["q_rot", "k_rot"], mode="heads"))
    run.sink.begin(microbatch(tokens=16, slots=zigzag(16, 0, 2)))
    for point, shard in zip(("q_rot", "k_rot"), shards, strict=True):
        run.sink.put(0, tap(point, shard=shard), torch.randn(2, 8, 4, 4))
    run.sink.end_step(0)
    run.close()
    assert run.failures == [] and run.files == []
    assert "context parallelism" in run.told[-1]["missed"]["heads"]


def test_weights_are_kept_by_step_and_layer(tmp_path):
    run = Recording(tmp_path, Capture("unembed"))
    unembed = Shard(("vocab", "hidden"), (10, 4), split={"vocab": Split(0, 2, 0, 10, 20)})
    bias = Shard(("hidden",), (4,))
    for step in (0, 10):
        run.sink.weights(step, "unembed", -1, torch.full((10, 4), step), unembed)
        run.sink.weights(step, "b_o", 3, torch.full((4,), step + 0.5), bias, dtype="bfloat16")
        run.sink.end_step(step)
    run.close()
    assert run.failures == []
    with run.block() as block:
        assert block.array("weights", "step")[...].tolist() == [0, 10]
        assert block.streams["weights"]["unembed"].dims == ("step", "vocab", "hidden")
        np.testing.assert_array_equal(block.array("weights", "unembed")[:, 0, 0], [0, 10])
        assert block.streams["weights"]["b_o"].attrs["layers"] == [3]
        np.testing.assert_array_equal(read(block, "weights", "b_o")[:, 0, 0], [0.5, 10.5])


def test_model_chunks_share_the_rows_of_a_microbatch(tmp_path):
    run = Recording(tmp_path, Capture("resid_post", gradients=True))
    infos = {}
    for chunk in (0, 1):
        for number in (0, 1):
            infos[chunk, number] = microbatch(0, number, chunk=chunk)
            run.sink.begin(infos[chunk, number])
            run.sink.put(0, tap(layer=2 * chunk), torch.full((2, 8, 16), 10.0 * chunk + number))
    for number in (1, 0):  # gradients come in another order
        run.sink.put(0, tap(layer=2), torch.full((2, 8, 16), -1.0 - number), True, info=infos[1, number])
    run.sink.end_step(0)
    run.close()
    with run.block() as block:
        assert block.samples("full")["microbatch"].tolist() == [0, 0, 1, 1]
        assert block.array("full", "resid_post")[:, :, 0, 0].tolist() == [[0, 10], [0, 10], [1, 11], [1, 11]]
        assert block.array("full", "resid_post_grad")[:, 0, 0, 0].tolist() == [-1, -1, -2, -2]


def test_a_tensor_that_comes_twice_is_kept_once(tmp_path):
    run = Recording(tmp_path, Capture("resid_post"))
    run.sink.begin(microbatch())
    for value in (1.0, 2.0):
        run.sink.put(0, tap(), torch.full((2, 8, 16), value))
    run.sink.end_step(0)
    run.close()
    with run.block() as block:
        assert (block.array("full", "resid_post")[...] == 1).all()
    assert run.log[0]["repeated"] == 1


# ------------------------------------------------------------------------------------------------------ queue and failures


@pytest.fixture
def slow_disk(monkeypatch):
    """The writer waits for ``gate`` before each piece."""
    gate = threading.Event()
    add = block_files.BlockFiles.add

    def waiting(self, piece):
        assert gate.wait(20)
        add(self, piece)

    monkeypatch.setattr(block_files.BlockFiles, "add", waiting)
    return gate


def fill(run, *, microbatches, layers=1):
    for number in range(microbatches):
        run.sink.begin(microbatch(0, number))
        for layer in range(layers):
            run.sink.put(0, tap(layer=layer), torch.full((2, 8, 16), float(number)))


PIECE = ITEM_BYTES + 2 * 8 * 16 * 4


def test_drop_leaves_out_and_counts(tmp_path, slow_disk):
    run = Recording(tmp_path, Capture("resid_post"), policy="drop", queue_bytes=4 * PIECE)
    fill(run, microbatches=10)
    slow_disk.set()
    run.sink.end_step(0)
    run.close()
    dropped = run.sink.counters["dropped"]["full"]
    assert run.told[-1] == run.sink.counters
    assert dropped == 6 and run.log[0]["dropped"] == {"full": 6} and run.sink.counters["waited_s"] == 0
    with run.block() as block:
        assert block.samples("full")["microbatch"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_many_small_things_are_bounded_too(tmp_path, slow_disk):
    rules = Capture("resid_post", steps=0, name="a"), Capture("resid_post", mode="stats", name="b")
    run = Recording(tmp_path, *rules, policy="drop", queue_bytes=20 * ITEM_BYTES)
    fill(run, microbatches=1)
    run.sink.end_step(0)
    for step in range(1, 41):  # one row of statistics each: nothing that fills a queue by its numbers
        run.sink.begin(microbatch(step, 0))
        run.sink.put(1, tap(), torch.ones(2, 8, 16))
        run.sink.end_step(step)
    slow_disk.set()
    run.close()
    assert 20 <= run.sink.counters["dropped"]["b"] <= 24
    assert run.sink.counters["dropped"].keys() == {"b"}


def test_thin_halves_the_microbatches_whole(tmp_path, slow_disk):
    run = Recording(tmp_path, Capture("resid_post"), policy="thin", queue_bytes=24 * PIECE)
    fill(run, microbatches=40, layers=2)
    slow_disk.set()
    run.sink.end_step(0)
    run.close()
    counters = run.sink.counters
    with run.block() as block:
        kept = sorted(set(block.samples("full")["microbatch"].tolist()))
        assert block.array("full", "resid_post_present")[
            ...
        ].all()  # a microbatch is there with all its layers, or not at all
    assert kept[:6] == [0, 1, 2, 3, 4, 5] and len(kept) < 20
    assert counters["thinned"]["full"] == 2 * (40 - len(kept)) and counters["dropped"] == {}


def test_thinning_ends_when_the_queue_is_empty_again(tmp_path):
    from mappnb.capture.activations.queue import ByteQueue

    queue = ByteQueue(1000, "thin")
    queue.put("x", 900)
    assert [queue.skips(n) for n in range(4)] == [False, True, True, True]
    queue.get(0)
    queue.release(900)
    assert not any([queue.skips(n) for n in range(4, 40)][8:])


def test_block_waits_and_loses_nothing(tmp_path, slow_disk):
    run = Recording(tmp_path, Capture("resid_post"), policy="block", queue_bytes=3 * PIECE)
    threading.Timer(0.2, slow_disk.set).start()
    fill(run, microbatches=12)
    run.sink.end_step(0)
    run.close()
    assert run.sink.counters["waited_s"] > 0.05 and run.sink.counters["dropped"] == {}
    with run.block() as block:
        assert len(block.samples("full")["step"]) == 24


def test_a_step_larger_than_the_queue_is_written_while_it_runs(tmp_path):
    run = Recording(tmp_path, Capture("resid_post"), policy="block", queue_bytes=2 * PIECE)
    fill(run, microbatches=30)
    run.sink.end_step(0)
    run.close()
    assert run.failures == [] and len(run.files) == 1


def test_a_stuck_writer_turns_the_sink_off(tmp_path, slow_disk, monkeypatch):
    from mappnb.capture.activations import queue

    monkeypatch.setattr(queue, "PATIENCE_S", 0.1)
    run = Recording(tmp_path, Capture("resid_post"), policy="block", queue_bytes=2 * PIECE)
    fill(run, microbatches=12)
    assert not run.sink.on and [type(e).__name__ for _, e in run.failures] == ["WriterStuckError"]
    slow_disk.set()
    run.sink.end_step(0)
    run.sink.close(20)


def test_a_failing_writer_is_told_once_and_earlier_blocks_stay(tmp_path, monkeypatch):
    run = Recording(tmp_path, Capture("resid_post"), join_s=0.0)
    fill(run, microbatches=2)
    run.sink.end_step(0)
    deadline = time.monotonic() + 20
    while not run.told and time.monotonic() < deadline:
        time.sleep(0.01)

    def full(self, key, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mappnb.activation_blocks.BlockWriter._entry", full)
    for step in (1, 2):
        run.sink.begin(microbatch(step))
        run.sink.put(0, tap(), torch.ones(2, 8, 16))
        run.sink.end_step(step)
        time.sleep(0.05)
    run.sink.close(20)
    assert [(where, type(err)) for where, err in run.failures] == [("writer of activations", OSError)]
    assert "No space left" in run.sink.reason and not run.sink.on
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block-000000.zarr.zip", LOG_NAME]
    run.block().close()


def test_a_disk_that_is_full_at_the_last_block_is_told_too(tmp_path, monkeypatch):
    run = Recording(tmp_path, Capture("resid_post"))
    fill(run, microbatches=2)
    run.sink.end_step(0)
    monkeypatch.setattr(
        "mappnb.activation_blocks.os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    run.sink.close(20)
    assert len(run.failures) == 1 and run.files == [] and list(tmp_path.glob("*.tmp")) == []


def test_a_failing_put_does_not_raise(tmp_path):
    run = Recording(tmp_path, Capture("resid_post"))
    run.sink.begin(microbatch())
    run.sink.put(0, tap(), "no tensor")
    run.sink.put(0, tap(), torch.ones(2, 8, 16))
    run.sink.end_step(0)
    run.sink.close()
    assert len(run.failures) == 1 and "resid_post" in run.failures[0][0] and not run.sink.on


def test_a_folder_that_becomes_known_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sink_thread, "_FOLDER_PATIENCE_S", 0.5)
    folder = [None]
    sink = ActivationSink(CapturePlan(Capture("resid_post")), META, lambda: folder[0])
    sink.begin(microbatch())
    sink.put(0, tap(), torch.ones(2, 8, 16))
    sink.end_step(0)
    threading.Timer(0.2, lambda: folder.__setitem__(0, tmp_path / "late")).start()
    assert sink.close() and len(list((tmp_path / "late").glob("block-*.zip"))) == 1
    nowhere = ActivationSink(CapturePlan(Capture("resid_post")), META, lambda: None)
    nowhere.begin(microbatch())
    nowhere.put(0, tap(), torch.ones(2, 8, 16))
    assert nowhere.close()


def test_small_steps_are_joined_and_large_ones_closed(tmp_path, monkeypatch):
    run = Recording(tmp_path / "joined", Capture("resid_post"))
    for step in range(5):
        run.sink.begin(microbatch(step))
        run.sink.put(0, tap(), torch.ones(2, 8, 16))
        run.sink.end_step(step)
    run.close()
    assert [e["steps"] for e in run.log] == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 1000)
    run = Recording(tmp_path / "apart", Capture("resid_post"))
    for step in range(3):
        run.sink.begin(microbatch(step))
        run.sink.put(0, tap(), torch.randn(2, 8, 16))
        run.sink.end_step(step)
    run.close()
    assert [e["steps"] for e in run.log] == [[0], [1], [2]]
    again = Recording(tmp_path / "apart", Capture("resid_post"))  # never writes over a block
    again.sink.begin(microbatch(3))
    again.sink.put(0, tap(), torch.ones(2, 8, 16))
    again.sink.end_step(3)
    again.close()
    assert again.files == [f"block-{n:06d}.zarr.zip" for n in range(4)]


def test_an_old_block_is_closed_without_another_step(tmp_path, monkeypatch):
    monkeypatch.setattr(sink_thread, "_ROUND_S", 0.02)
    run = Recording(tmp_path, Capture("resid_post"), join_s=0.1)
    fill(run, microbatches=1)
    time.sleep(0.4)
    assert run.files == []  # the step still runs
    run.sink.end_step(0)
    deadline = time.monotonic() + 20
    while not run.files and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(run.files) == 1
    run.close()


def test_only_the_first_block_of_rank_0_has_the_vocabulary(tmp_path):
    for rank, has in ((0, True), (1, False)):
        rule = Capture("resid_post")
        run = Recording(tmp_path / str(rank), rule, meta={**META, "rank": rank}, vocabulary=["a", "b"], join_s=0.0)
        for step in (0, 1):
            fill(run, microbatches=1)
            run.sink.end_step(step)
            time.sleep(0.05)
        run.close()
        found = ["vocabulary" in run.block(i).attrs["plan"] for i in range(len(run.files))]
        assert found == [has, False]


def test_kill_leaves_earlier_blocks_readable(tmp_path):
    program = """
        import os, sys, time
        import numpy as np, torch
        from types import SimpleNamespace
        from mappnb.capture.activations.microbatch import Microbatch
        from mappnb.capture.activations.plan import Capture, CapturePlan
        from mappnb.capture.activations.shard import Shard
        from mappnb.capture.activations.sink import ActivationSink

        sink = ActivationSink(CapturePlan(Capture("resid_post")), {"rank": 0}, lambda: sys.argv[1], join_s=0.0)
        shard = Shard(("sample", "token", "hidden"), (64,))
        taps = [SimpleNamespace(point="resid_post", layer=layer, shard=shard, name="x") for layer in (0, 1)]
        for step in range(100000):
            sink.begin(Microbatch(step, 0, 0, 0, 1, np.arange(64), 64))
            for tap in taps:
                sink.put(0, tap, torch.full((1, 64, 64), float(step)))
            sink.end_step(step)
            print(step, flush=True)
            time.sleep(0.01)
    """
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for _line in job.stdout:
        if len(list(tmp_path.glob("block-*.zip"))) >= 10:
            os.kill(job.pid, signal.SIGKILL)
            break
    job.wait()
    job.stdout.close()
    blocks = sorted(tmp_path.glob("block-*.zip"))
    assert len(blocks) >= 10
    steps = []
    for path in blocks:
        with open_block(path) as block:
            step = block.samples("full")["step"]
            np.testing.assert_array_equal(block.array("full", "resid_post")[:, 0, 0, 0], step)
            steps += step.tolist()
    assert steps == list(range(len(steps)))
    data = (tmp_path / LOG_NAME).read_bytes()
    logged = [e["file"] for e in read_log(data)]
    assert logged == [p.name for p in blocks][: len(logged)] and len(logged) >= len(blocks) - 1
    assert read_log(data[:-7]) == read_log(data)[:-1]  # a line that was cut off is no line
    json.loads(data.splitlines()[0])
