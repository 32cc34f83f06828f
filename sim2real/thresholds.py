"""What `ctrl-rl verify` asks for and how it measures; no heavy import, for `--help`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What a file must reach."""

    max_falls: float = 0.02
    """Share of episodes that end in a fall [-]: trunk on the floor, or tilt over `max_tilt_deg`."""
    max_lin_error: float = 0.15
    """RMS tracking error of each linear velocity [m/s]."""
    max_ang_error: float = 0.2
    """RMS tracking error of each angular velocity [rad/s]."""
    max_drift: float = 0.05
    """Farthest that a standing robot moves in `stand_s` [m]."""
    min_feet_down: float = 0.99
    """Share of the standing time with all feet on the floor [-]."""
    max_obs_difference: float = 1e-5
    """Of any observation element from the training environment's, after scaling [-]."""


@dataclass(frozen=True, kw_only=True)
class Procedure:
    """How it is measured."""

    episodes: int = 200
    """Robots, one episode each."""
    episode_s: float = 20.0
    """How long each robot follows commands [s]."""
    command_s: float = 5.0
    """Time between commands [s]."""
    settle_s: float = 1.0
    """Left out after each new command [s]."""
    stand_s: float = 10.0
    """How long a robot told to stand is watched, once it has settled [s]."""
    max_tilt_deg: float = 60.0
    """Tilt of the body from upright that counts as a fall [deg]."""
    seed: int = 0
    """Decides starts and commands."""
    threads: int = 0
    """Of the physics; 0 for all cores."""

    def __post_init__(self) -> None:
        for name in ("episodes", "episode_s", "command_s", "stand_s", "max_tilt_deg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.settle_s < min(self.command_s, self.episode_s):
            raise ValueError("settle_s must lie between 0 and the shorter of command_s, episode_s")
