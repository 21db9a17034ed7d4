"""What moves bytes between two workers: shared memory, TCP, torch.distributed, NIXL, and their registry."""
