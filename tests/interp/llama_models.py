"""Small random Llamas of transformers, what passes inside them seen by torch hooks of our own, and the same model in each rank of a job."""

from __future__ import annotations

import warnings

import numpy as np
from points_seen import BLOCK

POINTS = ["embed", *BLOCK, "mlp_gate", "mlp_up", "mlp_act", "mlp_out", "resid_post", "final_ln", "logits"]
# module in a layer -> (point of its input, point of its output)
INSIDE = {
    "": ("resid_pre", "resid_post"),
    "input_layernorm": (None, "ln1_out"),
    "self_attn.q_proj": (None, "q"),
    "self_attn.k_proj": (None, "k"),
    "self_attn.v_proj": (None, "v"),
    "self_attn.o_proj": ("z", "attn_out"),
    "post_attention_layernorm": ("resid_mid", "ln2_out"),
    "mlp.gate_proj": (None, "mlp_gate"),
    "mlp.up_proj": (None, "mlp_up"),
    "mlp.down_proj": ("mlp_act", "mlp_out"),
}


def hf_llama(*, layers=4, tied=False, head_dim=8, vocab=99):
    """A Llama with unequal query and key-value heads, weights large enough to tell heads apart, norms that are not one."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.25,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
    return model


def padded_batch(vocab=99):
    """Tokens and mask, dims (sample, token): unequal lengths, padding on the left."""
    mask = np.arange(11) >= np.array([[0], [4], [7]])
    tokens = np.random.default_rng(2).integers(1, vocab, mask.shape)
    return np.where(mask, tokens, 0), mask


def inside(model, tokens, mask):
    """Every point as transformers computes it, eager, dims (sample, layer, token, ...); patterns (sample, layer, head, query, key)."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    found, handles = {}, []

    def look(module, entering, leaving, layer):
        def hook(_, args, kwargs, output):
            first = args[0] if args else next(iter(kwargs.values()))
            for point, tensor in ((entering, first), (leaving, output)):
                if point:
                    found[point, layer] = (tensor[0] if isinstance(tensor, tuple) else tensor).detach().clone()

        handles.append(module.register_forward_hook(hook, with_kwargs=True))

    for number, block in enumerate(model.model.layers):
        for path, points in INSIDE.items():
            look(block.get_submodule(path), *points, number)
    look(model.model.embed_tokens, None, "embed", -1)
    look(model.model.norm, None, "final_ln", -1)
    look(model.lm_head, None, "logits", -1)
    positions = torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0))
    with torch.no_grad():
        output = model(
            torch.from_numpy(tokens),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            position_ids=positions,
            output_attentions=True,
            use_cache=False,
        )
    for handle in handles:
        handle.remove()
    size, cos_sin = model.config.head_dim, model.model.rotary_emb(output.logits, positions)
    for number in range(len(model.model.layers)):
        for point in ("q", "k", "v", "z"):
            found[point, number] = found[point, number].unflatten(-1, (-1, size))
        turned = apply_rotary_pos_emb(*(found[p, number].transpose(1, 2) for p in "qk"), *cos_sin)
        found["q_rot", number], found["k_rot", number] = (part.transpose(1, 2) for part in turned)
    assert torch.equal(found["logits", -1], output.logits)
    names = dict.fromkeys(point for point, _ in found)
    by = {name: [found[key] for key in sorted(found, key=lambda key: key[1]) if key[0] == name] for name in names}
    points = {name: (parts[0] if (name, -1) in found else torch.stack(parts, 1)).numpy() for name, parts in by.items()}
    return points, torch.stack(output.attentions, 1).numpy()


def converted(folder, layout, tokens, mask):
    """Run in each rank: every point and every pattern of the folder's model, through megatron-core in this layout."""
    warnings.filterwarnings("ignore")
    from mappnb.interp import Model, attention_pattern, generate
    from mappnb.testing.llama import LlamaCheckpoint, megatron_llama

    checkpoint = LlamaCheckpoint.open(folder)
    with megatron_llama(checkpoint, **layout) as chunks:
        model = Model(chunks, vocab_size=checkpoint.shape.vocab)
        run = model.forward(tokens, mask, capture=POINTS)
        points = {name: run.activations[name].values for name in POINTS}
        points["output"] = run.logits.values
        patterns = [
            attention_pattern(run.activations, layer=None, head=None, sample=n).values for n in range(len(tokens))
        ]
        text = generate(model, [row[real].tolist() for row, real in zip(tokens, mask, strict=True)], max_new_tokens=5)
        return points, np.stack(patterns), text["token_id"].where(text["mask"], -1).values


def continued(folder, layout, prompts, count, repeated=None):
    """Run in each rank: greedy tokens of prompts, and the statistics of heads on a text that comes twice."""
    warnings.filterwarnings("ignore")
    from mappnb.interp import Model, generate, head_statistics
    from mappnb.testing.llama import megatron_llama

    with megatron_llama(folder, **layout) as chunks:
        model = Model(chunks)
        text = generate(model, prompts, max_new_tokens=count)
        rows = [row[real].tolist() for row, real in zip(text["token_id"].values, text["mask"].values, strict=True)]
        if repeated is None:
            return rows, None, None
        seen = model.forward(repeated, capture=["q_rot", "k_rot"], layers=[2, 11, 16, 17, 18]).activations
        return rows, head_statistics(seen)[["induction", "previous_token", "bos_mass"]], seen
