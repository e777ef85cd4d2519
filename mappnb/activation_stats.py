"""Statistics of tensors: fields, exact merging; the numpy twin of the native pass."""
