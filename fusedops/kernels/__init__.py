"""One file an operator: HOW the GPU does it (Triton code and its launcher on plain tensors). Imported at the first launch."""
