"""One simulated engine, which the planner and the simulator drive."""
