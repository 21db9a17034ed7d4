"""Tensors between a device, host memory and files: KV blocks, weights, the streams that copy them."""
