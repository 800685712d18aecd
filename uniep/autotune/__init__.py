"""Which configuration of the kernels is fastest: a description of the GPUs, a model of a launch, an exact search."""
