"""The Triton kernels: signals, one file per tile-level role, one per fused kernel."""
