"""Small live models: a megatron-core GPT in this job's layout, and a Llama by hand, of plain torch."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from points_seen import BLOCK
from torch import nn

PROMPT, OTHER = "hello world", "jello wurst"


@contextmanager
def gpt(**settings):
    """Chunks of a GPT whose weights do not depend on the layout, large enough to have something to say."""
    from mappnb.testing import gpt_model
    from mappnb.testing.cpu_groups import cpu_groups
    from mappnb.testing.gpt_settings import TrainSettings

    cpu = torch.device("cpu")
    made = TrainSettings(**{"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, **settings})
    with warnings.catch_warnings(), cpu_groups(made):
        warnings.simplefilter("ignore")
        chunks = gpt_model.build_model(made, gpt_model.model_config(made, cpu), cpu)
        with torch.no_grad():
            for chunk in chunks:
                for name, weight in chunk.named_parameters():
                    if weight.dim() > 1:
                        weight.mul_(3.0)
                    elif (
                        "norm" in name or "linear_proj" in name
                    ):  # biases of norms and of attention, one share on all ranks
                        weight.add_(0.1 * torch.cos(torch.arange(len(weight), dtype=weight.dtype)))
        yield chunks


def bare(chunks, tokens, **options):
    """Logits of the chunk itself, called as megatron-core's users call it: no code of ours."""
    ids = torch.as_tensor(np.atleast_2d(tokens))
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    return chunks[0](ids, torch.arange(ids.shape[1]).expand_as(ids), mask, **options)


class _Config:
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 256, 32, 3, 4, 2
    intermediate_size, rms_norm_eps, rope_theta, hidden_act, model_type = 48, 1e-6, 1e4, "silu", "llama"
    tie_word_embeddings = False


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k_proj, self.v_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2)) / 8**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.o_proj((pattern @ v).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(32, eps=1e-6), nn.RMSNorm(32, eps=1e-6)
        self.self_attn, self.mlp = _Attention(), _Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(256, 32), nn.RMSNorm(32, eps=1e-6)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """Module names of Hugging Face's Llama; no rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = _Config(), _Body(), nn.Linear(32, 256, bias=False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def llama():
    torch.manual_seed(5)
    made = Llama()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(2.0)
    return made


def everything(settings):
    """Run in each rank: what forward, generate, patching, tracing and explaining give, as plain arrays."""
    from mappnb.interp import Edit, Model, activation_patching, causal_trace, explain, generate

    with gpt(**settings) as chunks:
        model = Model(chunks, "bytes")
        found = {}
        tokens, mask = np.array([[0, 0, 0, *b"left"], list(b"a batch")]), np.arange(7) >= np.array([[3], [0]])
        edits = [
            Edit(point="z", layer=1, heads=[1, 3], tokens=-1, kind="scale", value=0.5),
            Edit(point="resid_post", layer=[0, 2], tokens=5, kind="noise", value=0.1, samples=1),
            Edit(point="mlp_act", layer=2, neurons=[0, 17, 255], kind="zero", strength=0.7),
        ]
        points = ["embed", *BLOCK, "mlp_act", "mlp_out", "resid_post", "final_ln", "logits"]
        backward = [f"{point}.grad" for point in ("embed", "z", "attn_out", "mlp_act", "resid_post", "final_ln")]
        run = model.forward(tokens, mask, capture=[*points, *backward], edits=edits, gradients=("a", "b"))
        real = run.activations["mask"]
        found |= {f"forward {name}": values.where(real).values for name, values in run.activations.data_vars.items()}
        found |= {"forward": run.logits.where(run.logits["mask"]).values, "metric": run.metric.values}
        assert all(bool(run.activations[f"{name}_present"].all()) for name in run.activations.data_vars)
        some = generate(
            model, ["one", "another prompt"], max_new_tokens=6, temperature=1.0, top_p=0.9, seed=4, capture="q_rot"
        )
        found |= {
            f"generate {n}": some[n].values for n in ("token_id", "logprob", "entropy", "alternative_id", "q_rot")
        }
        found["patching"] = activation_patching(
            model, PROMPT, OTHER, metric=("a", "b"), point="z", heads="each", layers=[1, 2], tokens=[3, -1]
        ).values
        found["trace"] = causal_trace(model, PROMPT, subject="ello", samples=3, window=2).probability.values
        told = explain(model, PROMPT, "a", instead_of="b", neurons=20)
        checked = told.check(6)
        up = told.upstream(told.table.index[(told.table["component"] == "mlp") & (told.table["layer"] == 2)][-1])
        for name, table in (("explain", told.table), ("check", checked), ("upstream", up[:60])):
            found[name] = table.select_dtypes("number").to_numpy(float)
        found |= {
            f"weight {n}": values.values
            for n, values in model.weights(["unembed", "w_o", "b_o", "w_out"]).data_vars.items()
        }
        return found


def training(settings, asked, run_dir=None):
    """Losses of a training job; ``asked``: with questions to the model after each step, as a notebook would put them."""
    import mappnb
    from mappnb.interp import Model, explain, generate
    from mappnb.testing import gpt_train
    from mappnb.testing.cpu_groups import cpu_groups
    from mappnb.testing.gpt_settings import TrainSettings
    from mappnb.testing.interrupt import StopFlag

    warnings.simplefilter("ignore")
    cpu, losses = torch.device("cpu"), []
    made = TrainSettings(layers=2, hidden=32, heads=4, steps=3, global_batch=4, dropout=0.0, **settings)
    with cpu_groups(made):
        recording = mappnb.record(run_dir, activations="default") if run_dir else nullcontext()
        job = gpt_train._Job.build(made, cpu)

        def step(report):
            losses.append(report.loss)
            if asked:
                model = Model(job.chunks, "bytes")
                generate(model, "hi", max_new_tokens=2, capture="all")
                assert abs(explain(model, "hello", "a", instead_of="b").unexplained) < 1e-5

        with recording:
            list(job.steps(step, StopFlag(), None))
    return losses
