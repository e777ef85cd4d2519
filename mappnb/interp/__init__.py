"""Inside the model: attention, lens, trajectories, generation, patching. Dataset or model in, labelled data out. Views are elsewhere."""

from __future__ import annotations

from mappnb._lazy_package import lazy

LAZY: dict[str, str] = {
    "Edit": "edits",
    "Explanation": "explanation",
    "Forward": "model",
    "Model": "model",
    "activation_patching": "patching",
    "attention_pattern": "attention",
    "attention_scores": "attention",
    "causal_trace": "causal",
    "check_context": "attention",
    "context": "attention",
    "direct_logit_attribution": "attribution",
    "drift": "drifting",
    "edited": "edits",
    "explain": "explanation",
    "find_heads": "heads",
    "find_nan": "drifting",
    "generate": "generation",
    "head_statistics": "heads",
    "logit_lens": "lens",
    "next_token_probabilities": "generation",
    "outliers": "drifting",
    "trajectories": "trajectory",
}
"""Public name -> module of this package; nothing is imported before it is used."""

__all__ = [*LAZY]  # noqa: PLE0604 (strings all)
__getattr__, __dir__ = lazy(__name__, LAZY)
