"""Every point of every layout, put together, is what one process captures, to 1e-5, layer by layer."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from points_seen import BLOCK

import mappnb
from mappnb._activation_index import BlockIndex
from mappnb.testing import rank_processes
from mappnb.testing.gpt import TrainSettings
from mappnb.testing.launcher import launch

pytest.importorskip("megatron.core", reason="needs torch and megatron-core")
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
slow = pytest.mark.slow
TOLERANCE = 1e-5
PLAN = {
    "rules": [
        {"points": ["all", "resid_post.grad"], "name": "full"},
        {"points": ["all"], "mode": "stats", "name": "stats"},
        {"points": ["q_rot", "k_rot"], "mode": "heads", "name": "heads"},
        {"points": ["resid_post", "q", "k"], "tokens": 5, "heads": [0, 3], "layers": [1, 3], "name": "last"},
        {"points": ["q", "mlp_act", "resid_mid"], "mode": "sketch", "size": 8, "name": "sketch"},
        {"points": ["unembed", "final_ln_weight", "w_o", "w_out"], "name": "parameters"},
    ],
    "vocabulary": "bytes",
}
TINY = TrainSettings(
    layers=4,
    hidden=48,
    heads=4,
    kv_heads=2,
    sequence_length=16,
    left_padding=5,
    micro_batch=2,
    global_batch=8,
    steps=1,
    plan="base",
    record_options={"activations": PLAN},
)
MODEL = ("experts", "gated_mlp", "untie")
LAYERS = (*BLOCK, "mlp_out", "resid_post")
DENSE = {"embed", *LAYERS, "mlp_pre", "mlp_act", "final_ln", "logits", "resid_post_grad"}
FOLDERS = []


@functools.cache
def record(world_size, **changes):
    """Train, and return the assembled stream, its samples by their number in the step, in one order for all layouts."""
    folder = tempfile.TemporaryDirectory(prefix="mappnb-ladder-")
    FOLDERS.append(folder)
    settings = dataclasses.replace(TINY, run_dir=str(Path(folder.name) / "run"), **changes)
    launch(settings, world_size=world_size, timeout_s=280)
    run = mappnb.attach(settings.run_dir)
    ds = read(run)
    assert run.meta["problems"] == {}
    assert bool(run.meta["missing_points"]) == bool(settings.experts), "inside experts there is no order of tokens"
    assert all(".mlp_" in line or "router" in line for line in run.meta["missing_points"])
    return run, ds


def read(run, stream="full"):
    ds = run.activations[stream].to_dataset()
    layout = json.loads(ds.attrs["layout"])
    number = (ds.microbatch * layout["dp"] + ds.dp_rank) * TINY.micro_batch + ds["index"]
    return ds.isel(sample=np.lexsort([number.values, ds.step.values])).assign_attrs(
        averaged=layout["dp"] * layout["cp"]
    )


def single_run(**changes):
    return record(1, **changes)[0]


@functools.cache
def single(**changes):
    return read(single_run(**changes)).load()


def errors(ds, truth):
    """Largest error of each point and layer, relative to the largest magnitude there."""
    out = {}
    for name in truth.data_vars:
        assert ds[name].dims == truth[name].dims
        assert ds[name].shape == truth[name].shape
        # megatron-core averages gradients of weights over dp x cp ranks after backward: those of activations are that much larger
        scale = ds.attrs["averaged"] if name.endswith("_grad") else 1
        over = [d for d in truth[name].dims if d != "layer"]
        worst = abs(ds[name] / scale - truth[name]).max(over) / abs(truth[name]).max(over)
        layers = truth.layer.values if "layer" in truth[name].dims else [-1]
        out |= {(name, int(n)): float(e) for n, e in zip(layers, np.atleast_1d(worst.values), strict=True)}
    return out


def check(ds, truth):
    assert set(ds.data_vars) == set(truth.data_vars)
    for table in ("token_id", "position", "mask", "token", "token_text"):
        np.testing.assert_array_equal(ds[table].values, truth[table].values)
    for name in truth.data_vars:
        assert ds[f"{name}_present"].values.all(), f"{name} is not whole"
    wrong = {k: e for k, e in errors(ds, truth).items() if not e <= TOLERANCE}
    assert not wrong, f"{wrong}"


def layout(name, world_size, *marks, **changes):
    return pytest.param(world_size, changes, id=name, marks=marks)


LAYOUTS = [
    layout("tp2_pp2", 4, tp=2, pp=2),
    layout("cp2", 2, cp=2),
    layout("tp2", 2, slow, tp=2),
    layout("pp2", 2, slow, pp=2),
    layout("tp2_sp", 2, slow, tp=2, sequence_parallel=True),
    layout("pp2_vpp2", 2, slow, pp=2, vpp=2),
    layout("dp2", 2, slow),
    layout("tp4_one_group_for_two_ranks", 4, slow, tp=4),
    layout("cp2_tp2_sp", 4, slow, cp=2, tp=2, sequence_parallel=True),
    layout("gated_untied_tp2_pp2_vpp2", 4, slow, tp=2, pp=2, vpp=2, gated_mlp=True, untie=True),
    layout("recompute_pp2", 2, slow, pp=2, recompute=True),
    layout("distributed_optimizer_overlap", 2, slow, distributed_optimizer=True, overlap=True),
    layout("moe_ep2", 2, slow, experts=4, ep=2),
    layout("moe_ep2_tp2_sp", 4, slow, experts=4, ep=2, tp=2, sequence_parallel=True),
]


@pytest.mark.parametrize(("world_size", "changes"), LAYOUTS)
def test_assembled_equals_the_single_process(world_size, changes):
    truth = single(**{k: changes[k] for k in MODEL if k in changes})
    assert ("router_prob" in truth) == ("experts" in changes)
    run, ds = record(world_size, **changes)
    check(ds, truth)
    check_other_streams(run, single_run(**{k: changes[k] for k in MODEL if k in changes}), changes)


def check_other_streams(run, one, changes):
    """What is left of each point by other modes, shards merged, summed or selected, is the same for every layout."""
    for stream in ("last", "sketch"):
        ds, truth = read(run, stream), read(one, stream)
        assert set(ds.data_vars) == set(truth.data_vars)
        np.testing.assert_array_equal(ds.token, truth.token)
        assert not {k: e for k, e in errors(ds, truth.load()).items() if not e <= TOLERANCE}
        assert all(ds[f"{n}_present"].values.all() for n in ds.data_vars)
    ds, truth = run.activations["stats"].to_dataset(), one.activations["stats"].to_dataset()
    assert set(truth.point.values) >= {"q", "logits", "resid_post"}
    np.testing.assert_array_equal(ds["count"], truth["count"])
    assert (truth["count"].sel(point="q", layer=3) > 0).all()
    for name in ("mean", "std", "min", "max", "absmax", "kurtosis", "sparsity", "num_nan"):
        np.testing.assert_allclose(ds[name], truth[name], rtol=2e-4, atol=1e-6)
    assert (abs(ds["histogram"] - truth["histogram"]).sum("bin") <= 2e-3 * truth["count"] + 4).all()
    if "cp" not in changes:  # the rank's own head statistics need all tokens
        ds, truth = read(run, "heads"), read(one, "heads")
        assert ds["entropy"].dims == ("sample", "layer", "head")
        for name in truth.data_vars:
            np.testing.assert_allclose(ds[name], truth[name], atol=2e-5)
    ds, truth = run.activations["weights"].to_dataset(), one.activations["weights"].to_dataset()
    assert set(truth.data_vars) >= {"unembed", "final_ln_weight", "w_o"}
    assert truth.w_o.dims == ("step", "layer", "head", "head_dim", "hidden")
    for name in truth.data_vars:
        np.testing.assert_array_equal(ds[name], truth[name])
        assert ds[f"{name}_present"].values.all()


def test_selected_tokens_heads_and_layers_are_those_of_the_whole():
    whole, last = single(), read(single_run(), "last")
    np.testing.assert_array_equal(last.token, np.arange(11, 16))
    np.testing.assert_array_equal(last["head"], [0, 3])
    np.testing.assert_array_equal(last["layer"], [1, 3])
    np.testing.assert_array_equal(last.q, whole.q.isel(layer=[1, 3], token=slice(11, None), head=[0, 3]))
    np.testing.assert_array_equal(last.k, whole.k.isel(layer=[1, 3], token=slice(11, None)))
    np.testing.assert_array_equal(last.token_id, whole.token_id.isel(token=slice(11, None)))


def test_statistics_are_those_of_the_tensors():
    whole, stats = single(), single_run().activations["stats"].to_dataset()
    for name in ("q", "logits"):
        values = whole[name].values if name == "logits" else whole[name].isel(layer=2).values
        row = stats.sel(point=name, layer=-1 if name == "logits" else 2).isel(step=0)
        assert int(row["count"]) == values.size and int(row["histogram"].sum()) == np.count_nonzero(values)
        np.testing.assert_allclose(
            [row["mean"], row["std"], row["max"]], [values.mean(), values.std(), values.max()], atol=1e-5
        )


def test_the_single_process_captures_what_it_should():
    truth = single()
    assert set(truth.data_vars) == DENSE
    assert truth.sizes["sample"] == TINY.global_batch and truth.sizes["layer"] == TINY.layers
    assert truth.q.sizes["head"] == 4 and truth.k.sizes["kv_head"] == 2
    padding = (~truth["mask"]).sum("token").values
    np.testing.assert_array_equal(padding, [7 * k % 6 for k in range(8)])
    assert "".join(truth.token_text.values[1, padding[1] :]).isprintable()
    for name in truth.data_vars:
        assert np.isfinite(truth[name]).all() and abs(truth[name]).max() > 0


def test_residual_stream_is_the_sum_of_what_is_added():
    truth = single()
    np.testing.assert_allclose(truth.resid_pre + truth.attn_out, truth.resid_mid, atol=1e-5)
    np.testing.assert_allclose(truth.resid_pre + truth.attn_out + truth.mlp_out, truth.resid_post, atol=1e-5)
    np.testing.assert_array_equal(truth.resid_pre.values[:, 0], truth.embed.values)
    np.testing.assert_array_equal(truth.resid_pre.values[:, 1:], truth.resid_post.values[:, :-1])


def test_attention_made_again_from_queries_and_keys_gives_the_captured_context():
    from mappnb.interp import attention_pattern

    truth = single()
    for layer, head in ((0, 0), (3, 3)):
        pattern = attention_pattern(truth, layer=layer, head=head, sample=1)
        real = truth["mask"].values[1]
        rows = pattern.values[real]
        np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-6)
        assert (np.triu(pattern.values, 1)[real] == 0).all()
        context = rows @ truth.v.values[1, layer, :, head // 2]
        np.testing.assert_allclose(context, truth.z.values[1, layer, real, head], atol=1e-5)


def test_ignoring_the_zigzag_order_is_noticed(monkeypatch):
    truth = single()
    run, _ = record(2, cp=2)
    slots = BlockIndex._slots

    def naive(self, file, stream, name):
        found = slots(self, file, stream, name)
        return None if found is None else self._share(np.arange(8) + 8 * file.attrs["coords"]["cp"])

    monkeypatch.setattr(BlockIndex, "_slots", naive)
    wrong = errors(read(mappnb.attach(run.path)), truth)
    assert min(e for (name, _), e in wrong.items() if name in ("q", "resid_post", "logits")) > 0.1


FUSED = """
from mappnb.testing import fork_ranks, gpt
from mappnb.testing.megatron_cpu import megatron_on_cpu
megatron_on_cpu(force=True)
from mappnb.capture.activations import tap_forms
from mappnb.testing import gpt_model

build = gpt_model.build_model
def build_model(*args):  # no module passes q and k alone: they are taken out of the output of linear_qkv
    chunks = build(*args)
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "q_layernorm"):
                module.q_layernorm = module.k_layernorm = None
    return chunks
gpt_model.build_model = build_model
"""
WRONG = """
def view(self, raw, hint=None):
    start, stop = self._bounds()
    heads = raw.unflatten(-1, (-1, self.head_dim))
    return heads[..., start * self.groups : stop * self.groups, :].transpose(0, 1)
tap_forms.GroupedHeads.view = view
"""


def fused(tmp_path, monkeypatch, more=""):
    script = tmp_path / "child.py"
    script.write_text(FUSED + more + "gpt.exit_now(fork_ranks.main())\n")
    monkeypatch.setattr(rank_processes, "FORK_MAIN", (str(script),))


@slow
@pytest.mark.parametrize(("world_size", "changes"), [layout("single", 1), layout("tp2", 2, tp=2)])
def test_taken_out_of_the_fused_projection(tmp_path, monkeypatch, world_size, changes):
    truth = single()
    fused(tmp_path, monkeypatch)
    check(record.__wrapped__(world_size, **changes)[1], truth)


def test_a_wrong_order_of_queries_keys_and_values_is_noticed(tmp_path, monkeypatch):
    """Taken as all queries, then all keys, then all values, which is what it is not."""
    truth = single()
    fused(tmp_path, monkeypatch, WRONG)
    _, ds = record.__wrapped__(1)
    wrong = errors(ds, truth)
    assert min(e for (name, _), e in wrong.items() if name in ("q", "k")) > 0.1
    with pytest.raises(AssertionError, match="'q'"):
        check(ds, truth)
