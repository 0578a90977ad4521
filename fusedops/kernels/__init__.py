"""HOW a GPU does it: Triton code and its launchers on plain tensors, imported at an operator's first launch."""
