"""What ranks run: compiled circuits and small models as megatron-core models, with everything their attention sees handed back."""

from __future__ import annotations

import warnings

import numpy as np

__all__ = ["circuit", "record_circuit", "record_sinks", "rules"]

POINTS = (
    "embed",
    "resid_pre",
    "q_rot",
    "k_rot",
    "v",
    "z",
    "attn_out",
    "resid_mid",
    "mlp_out",
    "resid_post",
    "final_ln",
    "logits",
)


def circuit(made, layout, tokens, mask=None):
    """Shards of all points, and the softmax's own output, of this rank; in float64."""
    warnings.filterwarnings("ignore")
    import torch

    from mappnb.capture.activations.taps import attached, find_taps
    from mappnb.testing.circuit_megatron import megatron_circuit

    shards, patterns = [], []

    def keep(tap, tensor):
        spans = {dim: (part.start, part.stop) for dim, part in tap.shard.split.items()}
        token = tap.shard.tokens(tokens.shape[1]) if "sp" in tap.shard.token else slice(0, tokens.shape[1])
        shards.append((tap.point, tap.layer, spans, (token.start, token.stop), tensor.detach().clone().numpy()))

    with megatron_circuit(made, **layout) as model, torch.no_grad():
        for chunk in model.chunks:
            for layer in chunk.decoder.layers:
                number, start = (
                    layer.layer_number - 1,
                    chunk.pg_collection.tp.rank() * made.num_heads // layout.get("tp", 1),
                )
                layer.self_attention.core_attention.scale_mask_softmax.register_forward_hook(
                    lambda *call, number=number, start=start: patterns.append(
                        (number, start, call[2].detach().clone().numpy())
                    )
                )
        with attached(find_taps(model.chunks, points=POINTS), keep):
            logits = model.forward(tokens, mask)
    return shards, patterns, logits


def record_circuit(made, layout, tokens, mask, run_dir, plan):
    """One training step of a circuit in float64, recorded by ``plan``; the logits."""
    warnings.filterwarnings("ignore")
    import mappnb
    from mappnb.testing.circuit_megatron import megatron_circuit

    with megatron_circuit(made, **layout) as model, mappnb.record(run_dir, plan="base", activations=plan):
        return model.forward(tokens, mask, backward=True)


def record_sinks(made, tokens, run_dir, plan):
    """The same on two tensor-parallel ranks with learned sinks, all of them different."""
    warnings.filterwarnings("ignore")
    import torch

    import mappnb
    from mappnb.testing import circuit_megatron

    def with_sinks(*args, plain=circuit_megatron._config, **options):
        config = plain(*args, **options)
        config.softmax_type = "learnable"
        return config

    circuit_megatron._config = with_sinks
    with circuit_megatron.megatron_circuit(made, tp=2) as model:
        with torch.no_grad():
            for layer in model.chunks[0].decoder.layers:
                offset = layer.self_attention.core_attention.softmax_offset
                offset.fill_(1500.0 if model.chunks[0].pg_collection.tp.rank() == 0 else 500.0 * layer.layer_number)
        with mappnb.record(run_dir, plan="base", activations=plan):
            return model.forward(tokens, backward=True)


def rules(every, tokens, layers=2):
    """For each set of options of TransformerConfig: q, k, v, z of a model with rotary positions, and its facts."""
    warnings.filterwarnings("ignore")
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mappnb.capture.activations.facts import model_facts
    from mappnb.capture.activations.taps import attached, find_taps
    from mappnb.testing import gpt_model
    from mappnb.testing.cpu_groups import cpu_groups
    from mappnb.testing.gpt_settings import TrainSettings

    settings = TrainSettings(layers=layers, hidden=64, heads=4, sequence_length=tokens.shape[1])
    results = []
    with cpu_groups(settings):
        for options in every:
            config = gpt_model.model_config(settings, torch.device("cpu"))
            for name, value in options.items():
                setattr(config, name, value)
            torch.manual_seed(1)
            model = GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=settings.vocab,
                max_sequence_length=settings.sequence_length,
                position_embedding_type="rope",
            )
            found = {}

            def keep(tap, tensor, found=found):
                found.setdefault(tap.point, {})[tap.layer] = tensor.detach().clone().numpy()

            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(8.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
                ids = torch.from_numpy(tokens)
                with attached(find_taps(model, points=("q_rot", "k_rot", "v", "z")), keep):
                    model(ids, torch.arange(ids.shape[1])[None].expand_as(ids), None)
            results.append(
                ({point: np.stack([by[n] for n in sorted(by)], 1) for point, by in found.items()}, model_facts(model))
            )
    return results
