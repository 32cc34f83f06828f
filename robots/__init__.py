"""Bodies, simulators and tasks. Knows MuJoCo, holds no learning code."""
