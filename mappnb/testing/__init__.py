"""Public test kit: megatron-core on the CPU, and a reference training job."""
