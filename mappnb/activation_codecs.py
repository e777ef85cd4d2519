"""Decoding of captured tensors: cast, int8, top-k, bucket, sketch."""
