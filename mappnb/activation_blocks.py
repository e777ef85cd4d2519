"""Files of captured activations: one zarr group in one zip file per rank and step block."""
