"""Names of the points inside a model at which tensors are captured, their dims, and how they are sharded."""
