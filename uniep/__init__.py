"""UniEP: the expert-parallel MoE block as two fused kernels, bit for bit TorchTitan's own."""
