"""Taps on megatron-core's GPTModel: every point in every layout equals the single process; replacement, recomputation, other specs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="taps are on torch modules")
pytest.importorskip("megatron.core", reason="needs the extra mappnb[megatron]")

from capture.activations.gpt_ranks import assemble, captured, gpt  # noqa: E402
from capture.ranks import run_ranks  # noqa: E402

from mappnb.activation_points import POINTS  # noqa: E402
from mappnb.capture.activations.taps import attached, find_taps, model_facts, weights_of  # noqa: E402
from mappnb.errors import CaptureError  # noqa: E402
from mappnb.testing.gpt_settings import TrainSettings  # noqa: E402

SMALL = dict(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    sequence_length=16,
    global_batch=4,
    micro_batch=2,
    device="cpu",
    left_padding=5,
)
SIZES = {"token": 16}
ALL = [*POINTS, *(f"{point}.grad" for point in POINTS)]
LAYOUTS = {
    "tp2": dict(tp=2),
    "tp2 sp": dict(tp=2, sequence_parallel=True),
    "pp2": dict(pp=2),
    "tp2 pp2": dict(tp=2, pp=2),
    "tp2 pp2 sp": dict(tp=2, pp=2, sequence_parallel=True),
    "pp2 interleaved": dict(pp=2, vpp=2),
    "cp2": dict(cp=2),
    "cp2 tp2 sp": dict(cp=2, tp=2, sequence_parallel=True),
    "tp2, fewer groups than ranks": dict(tp=2, kv_heads=1),
    "tp2, gated": dict(tp=2, gated_mlp=True, untie=True),
    "pp2, recomputed": dict(pp=2, recompute=True),
}
MOE = {"ep2": dict(ep=2), "ep2 tp2 sp": dict(ep=2, tp=2, sequence_parallel=True)}


def settings(**options) -> TrainSettings:
    return TrainSettings(**{**SMALL, **options})


@pytest.fixture(scope="module")
def single():
    """Every point and gradient of a single process, by the options that change the model."""
    known: dict[str, dict] = {}

    def get(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = captured(settings(**options).to_json(), ALL)
        return known[key]

    return get


def as_single(options):
    return {k: v for k, v in options.items() if k in ("kv_heads", "gated_mlp", "untie", "experts")}


def compare(ranks, alone, *, rtol=1e-5, grad_scale=1) -> set[str]:
    whole, expected = assemble(ranks, SIZES), assemble([alone], SIZES)
    assert set(whole) == set(expected)
    for name, arrays in expected.items():
        assert len(whole[name]) == len(arrays), name
        for number, array in enumerate(arrays):
            array = array * (grad_scale if name.endswith(".grad") else 1)
            scale = max(float(np.abs(array).max()), 1e-30)
            np.testing.assert_allclose(
                whole[name][number] / scale, array / scale, rtol=0, atol=rtol, err_msg=f"{name} {number}"
            )
    return set(expected)


def _lanes(layouts, *default) -> list:
    """All layouts, in the slow lane but for those named: the ladder takes others by way of files."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in layouts]


@pytest.mark.dist
@pytest.mark.parametrize("layout", _lanes(LAYOUTS, "tp2 pp2 sp", "pp2 interleaved"))
def test_every_point_of_every_layout_is_that_of_a_single_process(layout, single) -> None:
    options = LAYOUTS[layout]
    s = settings(**options)
    alone = single(**as_single(options))
    ranks = run_ranks(captured, s.tp * s.pp * s.cp, s.to_json(), ALL, timeout_s=240)
    partial = {f"layers.{n}.{p}" for n in range(4) for p in ("k", "k_rot", "v")} if 0 < s.kv_heads < s.tp else set()
    found = {
        n: i for n, i in alone["found"].items() if not (n.endswith(".grad") and n.removesuffix(".grad") in partial)
    }
    # gradients: megatron-core scales the loss by cp, since it averages gradients over these ranks
    names = compare(ranks, {**alone, "found": found}, rtol=2e-5, grad_scale=s.cp)
    assert all({line.split(":")[0] for line in rank["missing"]} == partial for rank in ranks)
    gone = {"router_prob", *(("mlp_pre",) if s.gated_mlp else ("mlp_gate", "mlp_up"))}
    assert {n.removesuffix(".grad").rpartition(".")[2] for n in names} >= set(POINTS) - gone
    gone |= {"k", "k_rot", "v"} if partial else set()
    assert {n.removesuffix(".grad").rpartition(".")[2] for n in names if n.endswith(".grad")} == set(POINTS) - gone


@pytest.mark.dist
@pytest.mark.parametrize("layout", _lanes(MOE, "ep2 tp2 sp"))
def test_experts(layout, single) -> None:
    options = {**MOE[layout], "experts": 4, "micro_batch": 1}
    s = settings(**options)
    points = [p for p in ALL if not p.startswith(("mlp_pre", "mlp_gate", "mlp_up", "mlp_act"))]
    alone = captured(settings(experts=4, micro_batch=1).to_json(), points)
    ranks = run_ranks(captured, 2 * s.tp, s.to_json(), points, timeout_s=240)
    # data-parallel ranks have other samples: microbatch m of rank d is sample 2 m + d of the single process
    for dp, group in enumerate([ranks[: s.tp], ranks[s.tp :]]):
        share = {
            n: {**i, "arrays": i["arrays"][dp::2]}
            for n, i in alone["found"].items()
            if not n.endswith(("grad", "o", "weight", "bias", "unembed"))
        }
        ours = [{**r, "found": {n: i for n, i in r["found"].items() if n in share}} for r in group]
        assert {f"layers.{n}.router_prob" for n in range(4)} <= compare(ours, {**alone, "found": share})


def test_a_wrong_order_of_heads_would_be_seen(single) -> None:
    alone = single()
    broken = {**alone, "found": dict(alone["found"])}
    item = broken["found"]["layers.1.q"]
    broken["found"]["layers.1.q"] = {**item, "arrays": [a[:, :, ::-1] for a in item["arrays"]]}
    with pytest.raises(AssertionError, match=r"layers\.1\.q"):
        compare([broken], alone)


def test_points_add_up(single) -> None:
    for options in ({}, {"gated_mlp": True, "untie": True}):
        found = assemble([single(**options)], SIZES)
        for layer in range(4):
            at = {
                n.rpartition(".")[2]: a[0]
                for n, a in found.items()
                if n.startswith(f"layers.{layer}.") and "grad" not in n
            }
            np.testing.assert_array_equal(at["resid_pre"] + at["attn_out"], at["resid_mid"])
            np.testing.assert_array_equal(at["resid_mid"] + at["mlp_out"], at["resid_post"])
            np.testing.assert_allclose(
                np.einsum("bthd,hdm->btm", at["z"], at["w_o"]) + at["b_o"], at["attn_out"], atol=1e-6
            )
        np.testing.assert_allclose(found["final_ln"][0] @ found["unembed"][0].T, found["logits"][0], atol=1e-5)


def test_heads_come_apart_from_the_fused_layer_as_megatron_takes_them_apart() -> None:
    with gpt(settings()) as job:
        model = job.chunks[0].module
        by_norm = {t.name: t for t in find_taps(model, points=["q", "k"])}
        for layer in model.decoder.layers:  # as in specs without these modules
            layer.self_attention.q_layernorm = layer.self_attention.k_layernorm = None
        by_fused = {t.name: t for t in find_taps(model, points=["q", "k"])}
        assert {t.site.module for t in by_fused.values()} != {t.site.module for t in by_norm.values()}
        seen: dict[str, torch.Tensor] = {}
        call = model_call()
        with attached(
            [*by_fused.values(), *find_taps(model, points=["q_rot", "k_rot", "v"])],
            lambda t, x: seen.__setitem__(t.name, x.detach().clone()),
        ):
            before = model(*call)
        for layer in range(4):  # the first token is turned by no angle
            for part in ("q", "k"):
                assert torch.equal(seen[f"layers.{layer}.{part}"][:, 0], seen[f"layers.{layer}.{part}_rot"][:, 0])
                norm = seen[f"layers.{layer}.{part}"].norm(dim=-1) - seen[f"layers.{layer}.{part}_rot"].norm(dim=-1)
                assert norm.abs().max() < 1e-6
        with attached(by_fused.values(), lambda t, x: x.clone()):
            assert torch.equal(model(*call), before)
        with attached(by_fused.values(), lambda t, x: x * 2):
            assert not torch.allclose(model(*call), before)


def model_call(batch: int = 2, tokens: int = 16):
    ids = torch.arange(batch * tokens).view(batch, tokens) % 97
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
    return ids, torch.arange(tokens).expand(batch, -1), mask


@pytest.mark.parametrize("gated", [False, True])
def test_an_equal_replacement_changes_nothing_and_another_reaches_the_output(gated) -> None:
    with gpt(settings(gated_mlp=gated)) as job:
        model, call = job.chunks[0], model_call()
        for layer in model.module.decoder.layers:  # biases count
            for name, parameter in layer.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.02)
        before = model(*call)
        with attached(find_taps(model), lambda tap, x: x.clone()):
            torch.testing.assert_close(model(*call), before, rtol=1e-5, atol=1e-6)
        for tap in find_taps(model, layers=[1]):
            with attached([tap], lambda tap, x: x + 1):
                changed = model(*call)
            assert not torch.allclose(changed, before), tap
            if tap.point == "logits":
                torch.testing.assert_close(changed, before + 1)
        assert torch.equal(model(*call), before)


def test_a_replaced_point_is_what_the_points_after_it_are_made_of() -> None:
    """Patching resid_mid reaches the MLP and the stream: resid_post = new resid_mid + MLP of it."""
    with gpt(settings()) as job:
        model, seen = job.chunks[0], {}

        def handler(tap, x):
            if tap.point == "resid_mid":
                return torch.full_like(x, 0.25) + torch.arange(32) / 32
            seen[tap.point] = x.detach().clone()
            return None

        with attached(find_taps(model, points=["resid_mid", "mlp_out", "resid_post"], layers=[2]), handler):
            model(*model_call())
        new = torch.full((2, 16, 32), 0.25) + torch.arange(32) / 32
        torch.testing.assert_close(seen["resid_post"], new + seen["mlp_out"])


def test_gradients_flow_through_a_replacement() -> None:
    with gpt(settings()) as job:
        model = job.chunks[0].module.double()
        scale = torch.tensor(1.5, requires_grad=True, dtype=torch.float64)
        with attached(find_taps(model, points="layers.1.z"), lambda tap, x: x * scale):
            model(*model_call()).square().mean().backward()
        up, down = (loss_with(model, 1.5 + d) for d in (1e-4, -1e-4))
        assert float(scale.grad) == pytest.approx((up - down) / 2e-4, rel=1e-4)


def loss_with(model, factor: float) -> float:
    with torch.no_grad(), attached(find_taps(model, points="layers.1.z"), lambda tap, x: x * factor):
        return float(model(*model_call()).square().mean())


def test_recomputed_forwards_are_not_reported_twice() -> None:
    counts: dict[str, int] = {}
    with gpt(settings(recompute=True, micro_batch=4)) as job:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        taps = find_taps(job.chunks, points=ALL)
        with attached(taps, lambda tap, x: counts.__setitem__(tap.name, counts.get(tap.name, 0) + 1)):
            job._train_step(0, get_forward_backward_func())
    assert {tap.name for tap in taps} == set(counts) and set(counts.values()) == {1}


def test_hooks_are_gone_after_the_with() -> None:
    with gpt(settings()) as job:
        model = job.chunks[0]
        with attached(find_taps(model), lambda tap, x: None):
            assert any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_facts_and_weights() -> None:
    with gpt(settings(gated_mlp=True)) as job:
        facts, weights = model_facts(job.chunks), weights_of(job.chunks, ["w_out", "layers.2.w_o"])
    wanted = {"num_layers": 4, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 128, "vocab": 256}
    assert {key: facts[key] for key in wanted} == wanted
    assert facts["gated"] is True and facts["causal"] is True and facts["tied"] is True and facts["num_experts"] == 0
    assert json.loads(json.dumps(facts)) == facts
    assert set(weights) == {"layers.2.w_o", *(f"layers.{n}.w_out" for n in range(4))}
    assert weights["layers.2.w_o"][0].shape == (4, 8, 32)


def test_windows_by_layer() -> None:
    from mappnb.capture.activations.facts import _windows

    config = SimpleNamespace(window_size=(7, 0), window_attn_skip_freq=2, num_layers=4)
    assert _windows(config) == [[7, 0], [-1, -1], [7, 0], [-1, -1]]
    config.window_attn_skip_freq = None
    assert _windows(config) == [7, 0]


def test_unknown_points() -> None:
    with gpt(settings()) as job:
        with pytest.raises(CaptureError, match=r"unknown point 'layers.1.resid_pst'; did you mean 'resid_post'"):
            find_taps(job.chunks, points="layers.1.resid_pst")
        assert find_taps(job.chunks, points="blocks.1.attn.hook_q")[0].name == "layers.1.q"
