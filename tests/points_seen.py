"""Names of points in the order in which a layer computes them."""

BLOCK = ("resid_pre", "ln1_out", "q", "k", "v", "q_rot", "k_rot", "z", "attn_out", "resid_mid", "ln2_out")
"""From the begin of a layer to the input of its MLP."""
