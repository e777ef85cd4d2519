"""Captured activations of a run as labelled, lazy datasets: the shards of all ranks assembled."""
