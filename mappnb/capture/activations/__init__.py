"""Capture of activations: plans, taps on modules, encoders, and the sink that writes each rank's own shards."""
