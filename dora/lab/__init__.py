"""The laboratory: the simulator, the engine that it simulates, and the planner. A service runs without it."""
