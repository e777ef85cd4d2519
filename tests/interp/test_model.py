"""A live model: forward passes with capture, edits and gradients; every layout gives what one process gives."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb.errors import InterpError
from mappnb.interp import Edit, Model, attention_pattern, check_context, edited

torch = pytest.importorskip("torch", reason="needs torch and megatron-core")
pytest.importorskip("megatron.core", reason="needs torch and megatron-core")

from capture.ranks import run_ranks  # noqa: E402
from interp.live_models import bare, everything, llama, training  # noqa: E402

PRELOAD = ("mappnb.testing.gpt_train", "mappnb.testing.gpt_model")
LAYOUTS = {
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 pp2 sp dp1": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "cp2 tp2 sp": (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
}


@pytest.fixture(scope="module")
def single():
    return run_ranks(everything, 1, {}, timeout_s=240, preload=PRELOAD)[0]


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "tp2 pp2" else [pytest.mark.slow]) for n in LAYOUTS])
def test_every_layout_gives_what_one_process_gives(single, name):
    """Captured points, gradients, edits, sampled text, patching, traces and explanations, on every rank."""
    ranks, layout = LAYOUTS[name]
    for rank, found in enumerate(run_ranks(everything, ranks, layout, timeout_s=280, preload=PRELOAD)):
        assert found.keys() == single.keys()
        for key, values in single.items():
            scale = max(1.0, float(np.nanmax(np.abs(values))))
            np.testing.assert_allclose(found[key], values, atol=1e-5 * scale, rtol=0, err_msg=f"rank {rank}: {key}")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {"distributed_optimizer": True, "overlap": True}, id="dp2 overlap"),
        pytest.param(1, {"experts": 4, "recompute": True}, id="experts", marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "gated_mlp": True, "untie": True}, id="pp2 gated", marks=pytest.mark.slow),
    ],
)
def test_questions_between_steps_leave_training_bit_equal(ranks, settings):
    plain, asked = (
        run_ranks(training, ranks, settings, asked, timeout_s=240, preload=PRELOAD) for asked in (False, True)
    )
    assert plain == asked
    assert plain[0][0] > plain[0][-1] > 0


@pytest.mark.dist
def test_questions_are_no_steps_of_a_recording(tmp_path):
    """Step table, forward steps of training and captured samples are those of the job alone."""
    runs = []
    for asked in (False, True):
        run_ranks(training, 1, {}, asked, str(tmp_path / str(asked)), timeout_s=240, preload=PRELOAD)
        runs.append(mappnb.attach(tmp_path / str(asked)))
    assert [not run.meta.get("problems") for run in runs] == [True, True]
    assert all(run.steps["step"].values.tolist() == [0, 1, 2] for run in runs)
    counts = [int(((run.events["op"] == "forward_step") & (run.events["category"] == "compute")).sum()) for run in runs]
    backward = [int((run.events["op"] == "backward_step").sum()) for run in runs]
    assert backward == [12, 12]
    assert counts[0] == 12
    first, second = (run.activations["stats"] for run in runs)
    assert first["count"].equals(second["count"])


def test_logits_are_those_of_the_model_itself(model, chunks):
    tokens = np.array([list(b"hello"), list(b"world")])
    chunks[0].eval()
    with torch.no_grad():
        wanted = bare(chunks, tokens).numpy()
    chunks[0].train()
    run = model.forward(tokens)
    np.testing.assert_array_equal(run.logits.values, wanted)
    np.testing.assert_array_equal(model.forward(tokens, logits="last").logits.values, wanted[:, -1])
    assert all(module.training for module in chunks[0].modules()), "what trained goes on training"


def test_padding_changes_nothing(model):
    alone = [model.forward(text, capture="resid_post") for text in ("abc", "defgh")]
    left = np.array([[7, 7, *b"abc"], list(b"defgh")])
    right = np.array([[*b"abc", 7, 7], list(b"defgh")])
    for tokens, mask in ((left, left != 7), (right, right != 7)):
        run = model.forward(tokens, mask, capture="resid_post")
        for sample, one in enumerate(alone):
            real = mask[sample]
            np.testing.assert_allclose(run.logits.values[sample][real], one.logits.values[0], atol=2e-6)
            found = run.activations["resid_post"].values[sample][:, real]
            np.testing.assert_allclose(found, one.activations["resid_post"].values[0], atol=5e-6)
        assert run.activations["position"].values[0][mask[0]].tolist() == [0, 1, 2]
    np.testing.assert_allclose(
        model.forward(left, left != 7, logits="last").logits.values[0], alone[0].logits.values[0, -1], atol=2e-6
    )


def test_residual_stream_and_lens(model):
    run = model.forward("hello", capture=["residual", "attn_out", "mlp_out", "final_ln"])
    found = run.activations
    np.testing.assert_allclose(
        found["resid_pre"] + found["attn_out"] + found["mlp_out"], found["resid_post"], atol=1e-5
    )
    lens = found["final_ln"].values[0] @ model.weights(["unembed"])["unembed"].values.T
    np.testing.assert_allclose(lens, run.logits.values[0], atol=1e-4)
    only = model.forward("hello", capture=["layers.2.q", "layers.0.k"]).activations
    assert only["layer"].values.tolist() == [0, 2]
    assert only["q_present"].any(("token", "head")).values.tolist() == [[False, True]]
    assert dict(only["k"].sizes)["kv_head"] == 2
    assert dict(only["q"].sizes)["head"] == 4
    assert only["token_text"].values[0].tolist() == list("hello")


def test_attention_can_be_recomputed_from_it(model):
    left = np.array([[7, 7, *b"abc"], list(b"defgh")])
    run = model.forward(left, left != 7, capture=["q_rot", "k_rot", "v", "z"])
    for sample in range(2):
        assert float(check_context(run.activations, sample=sample).max()) <= 1e-5
    pattern = attention_pattern(run.activations, layer=1, head=3, sample=0)
    np.testing.assert_allclose(pattern.values[2:, 2:].sum(1), 1.0, atol=1e-6)
    assert (pattern.values[2:, :2] == 0).all()


def test_capture_and_strength_0_are_bit_identical(model):
    plain = model.forward("hello")
    seen = model.forward("hello", capture="all")
    edits = [Edit(point=p, kind="noise", value=9.0, strength=0) for p in ("embed", "z", "resid_post")]
    np.testing.assert_array_equal(plain.logits.values, seen.logits.values)
    np.testing.assert_array_equal(plain.logits.values, model.forward("hello", edits=edits).logits.values)
    same = [Edit(point="resid_mid", kind="patch", value=seen.activations), Edit(point="z", kind="scale", value=1.0)]
    np.testing.assert_array_equal(plain.logits.values, model.forward("hello", edits=same).logits.values)


def test_ablating_a_head_is_taking_its_weights_out(model, chunks):
    weight = chunks[0].module.decoder.layers[2].self_attention.linear_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, 16:32] = 0.0  # head 1
    wanted = model.forward("hello").logits.values
    with torch.no_grad():
        weight.copy_(kept)
    found = model.forward("hello", edits=[Edit(point="layers.2.z", heads=1)]).logits.values
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert np.abs(found - model.forward("hello").logits.values).max() > 1e-3


def test_ablating_a_neuron_is_taking_its_weights_out(model, chunks):
    weight = chunks[0].module.decoder.layers[1].mlp.linear_fc2.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, [3, 200]] = 0.0
    wanted = model.forward("hello").logits.values
    with torch.no_grad():
        weight.copy_(kept)
    found = model.forward("hello", edits=[Edit(point="mlp_act", layer=1, neurons=[3, -56])]).logits.values
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_kinds_of_edits(model):
    clean = model.forward(["abcd", "efgh"], capture="z").activations["z"]

    def after(**options):
        edit = Edit(point="z", layer=1, tokens=[0, -1], samples=1, heads=2, **options)
        return model.forward(["abcd", "efgh"], capture="z", edits=[edit]).activations["z"]

    vector = np.arange(16.0)
    old = clean.values[1, 1][[0, 3]][:, 2]
    for options, wanted in [
        ({"kind": "zero"}, 0 * old),
        ({"kind": "set", "value": vector}, np.broadcast_to(vector, old.shape)),
        ({"kind": "add", "value": vector}, old + vector),
        ({"kind": "scale", "value": -2.0}, -2 * old),
        ({"kind": "scale", "value": -2.0, "strength": 0.5}, -0.5 * old),
        ({"kind": "mean", "value": clean}, np.broadcast_to(clean.values[:, 1, :, 2].mean((0, 1)), old.shape)),
        ({"kind": "patch", "value": clean[:1]}, clean.values[0, 1][[0, 3]][:, 2]),
    ]:
        found = after(**options).values
        np.testing.assert_allclose(found[1, 1][[0, 3]][:, 2], wanted, atol=1e-6, err_msg=str(options))
        found[1, 1, [0, 3], 2] = clean.values[1, 1, [0, 3], 2]
        np.testing.assert_array_equal(found[:, :2], clean.values[:, :2], err_msg="nothing else, up to the layer")
    noise = (after(kind="noise", value=0.5, seed=1).values - clean.values)[1, 1][[0, 3]][:, 2]
    again = (after(kind="noise", value=0.5, seed=1).values - clean.values)[1, 1][[0, 3]][:, 2]
    np.testing.assert_array_equal(noise, again)
    assert 0.25 < noise.std() < 0.9
    assert (
        np.abs(noise - (after(kind="noise", value=0.5, seed=2).values - clean.values)[1, 1][[0, 3]][:, 2]).max() > 0.1
    )


def test_gradients_are_autograds(model, chunks):
    """Against torch's own backward pass through the chunk; weights and their gradients stay as they were."""
    tokens = np.array([list(b"hello")])
    inner = chunks[0].module
    kept = []
    hook = inner.embedding.register_forward_hook(
        lambda module, args, output: (output.retain_grad(), kept.append(output))[0]
    )
    chunks[0].eval()
    logits = bare(chunks, tokens)
    hook.remove()
    (logits[0, -1, 97] - logits[0, -1, 98]).backward()
    wanted = kept[0].grad.transpose(0, 1).numpy()
    chunks[0].train()
    before = [weight.main_grad.clone() for weight in inner.parameters()]
    run = model.forward(tokens, capture=["embed.grad", "final_ln.grad"], gradients=("a", "b"))
    np.testing.assert_allclose(run.activations["embed_grad"].values, wanted, atol=1e-6 * np.abs(wanted).max())
    assert run.metric.item() == pytest.approx((logits[0, -1, 97] - logits[0, -1, 98]).item(), abs=1e-6)
    for weight, grad in zip(inner.parameters(), before, strict=True):
        assert weight.requires_grad
        assert torch.equal(weight.main_grad, grad)
    unembed = model.weights(["unembed"])["unembed"].values
    np.testing.assert_allclose(run.activations["final_ln_grad"].values[0, -1], unembed[97] - unembed[98], atol=1e-6)


def test_edited_training_lets_gradients_through(chunks):
    steer = torch.zeros(64, requires_grad=True)
    with edited(chunks, [Edit(point="resid_post", layer=1, tokens=-1, kind="add", value=steer)]):
        bare(chunks, list(b"hello"))[0, -1, 97].backward()
    wanted = Model(chunks, "bytes").forward("hello", capture="layers.1.resid_post.grad", gradients=97)
    np.testing.assert_allclose(steer.grad.numpy(), wanted.activations["resid_post_grad"].values[0, 0, -1], atol=1e-5)
    steer.grad = None
    bare(chunks, list(b"hello"))[0, -1, 97].backward()
    assert steer.grad is None, "nothing is left attached"


def test_a_torch_model_by_hand():
    made = llama()
    model = Model(made, "bytes")
    tokens = np.array([list(b"hello"), list(b"world")])
    with torch.no_grad():
        wanted = made(torch.as_tensor(tokens)).numpy()
    run = model.forward(tokens, capture=["resid_pre", "attn_out", "mlp_out", "resid_post", "z", "mlp_act"])
    np.testing.assert_array_equal(run.logits.values, wanted)
    found = run.activations
    np.testing.assert_allclose(
        found["resid_pre"] + found["attn_out"] + found["mlp_out"], found["resid_post"], atol=1e-5
    )
    assert found["layer"].values.tolist() == [0, 1, 2]
    backward = model.forward(tokens, capture="embed.grad", gradients=("a", "b")).activations["embed_grad"]
    rows = made.model.embed_tokens(torch.as_tensor(tokens)).detach().requires_grad_()
    x = rows
    for layer in made.model.layers:
        x = layer(x)
    logits = made.lm_head(made.model.norm(x))[:, -1]
    (logits[:, 97] - logits[:, 98]).sum().backward()
    np.testing.assert_allclose(backward.values, rows.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_a_mistake_is_told_before_anything_runs(model):
    for call, words in [
        (
            lambda: model.forward("hello", capture="resid_pots"),
            r"unknown point 'resid_pots'; did you mean 'resid_post'",
        ),
        (lambda: model.forward("hello", capture="layers.9.q"), r"layer 9: the model has layers 0 to 3"),
        (lambda: model.forward("hello", capture="q.grad"), r"'\.grad' point needs gradients="),
        (lambda: model.forward(np.array([[1, 400]])), r"sample 0, token 1: id 400; the model has ids 0 to 255"),
        (lambda: model.forward(np.array([[1, 2]]), np.array([[False, False]])), "sample 0: no token is real"),
        (lambda: model.forward("hello", capture=["q", "mlp_gate"]), "point 'mlp_gate': this model does not have it"),
        (lambda: Edit(point="z", kind="mean", value=1.0), "kind 'mean' averages activations"),
        (lambda: model.forward("hello", logits="first"), "expected 'all' or 'last'"),
        (lambda: model.forward("hello", gradients=("a", "bc")), r"token 'bc': the tokenizer makes 2 tokens of it"),
        (lambda: Edit(point="z", kind="zeros"), r"kind is 'zeros'; known: .*; did you mean 'zero'"),
        (lambda: Edit(point="z", kind="add"), "needs a value: x \\+ value"),
        (lambda: Edit(point="z", neurons=3), "it has dims head, head_dim, no neurons"),
        (lambda: Edit(point="q.grad"), "gradients and weights cannot"),
        (lambda: model.forward("hello", edits=[Edit(point="z", layer=4)]), "layer 4; the model has layers 0 to 3"),
        (lambda: model.forward("hello", edits=[Edit(point="z", heads=4)]), r"head \[4\]; the model has heads 0 to 3"),
        (
            lambda: model.forward("hello", edits=[Edit(point="z", tokens=5)]),
            r"token \[5\]; the batch has tokens 0 to 4",
        ),
        (
            lambda: model.forward("hello", edits=[Edit(point="resid_post", kind="set", value=np.zeros(63))]),
            r"value has shape \(63,\); expected what broadcasts to \(sample, token, hidden\) = \(1, 5, 64\)",
        ),
        (
            lambda: model.forward("hello", edits=[Edit(point="z", kind="patch", value=xr.Dataset({"q": 1.0}))]),
            "the activations hold q; capture 'z' too",
        ),
        (lambda: Model(model.chunks, 3), "tokenizer is int; expected an object with encode"),
        (lambda: Model(model.chunks).forward("hello"), "the model has no tokenizer"),
    ]:
        with pytest.raises(InterpError, match=words):
            call()
