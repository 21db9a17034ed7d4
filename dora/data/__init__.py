"""Plain data that all parts share: trajectories, sampling, the run record, bounds and validation."""
