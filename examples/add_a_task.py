"""A task of one's own in about 40 lines of code: a two-link arm reaches for a point.

Checks the task against the environment contract, then trains on it. An installed package makes
its tasks known to `ctrl-rl` by an entry point; see docs/environments.md.
"""

import argparse
from dataclasses import dataclass

import mujoco
import torch

import ctrl_rl
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from robots.env import TaskEnv
from robots.sim import make_mujoco_sim

MODEL = """
<mujoco>
  <option timestep="0.01"/>
  <default>
    <joint axis="0 0 1" damping="0.2"/> <geom type="capsule" size="0.02" mass="0.2"/>
  </default>
  <worldbody>
    <body> <joint name="shoulder"/> <geom fromto="0 0 0 0.5 0 0"/>
      <body pos="0.5 0 0"> <joint name="elbow"/> <geom fromto="0 0 0 0.5 0 0"/> </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="shoulder" gear="2" ctrlrange="-1 1"/> <motor joint="elbow" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""


# The task: from here ...
@dataclass(frozen=True, kw_only=True)
class ReachConfig:
    """Where the target may lie."""

    distance: tuple[float, float] = (0.3, 0.9)
    """From the shoulder [m]."""

    def evaluation(self):
        """What is evaluated: the same."""
        return self

    nominal = evaluation


class Reach(TaskEnv):
    """The hand shall rest on the target."""

    id = "Arm-Reach-v0"
    Config = ReachConfig
    presets = {"ppo": {"num_envs": 64, "num_steps": 32}}

    def make_sim(self, backend, device, threads):
        """N arms on any backend."""
        model = mujoco.MjModel.from_xml_string(MODEL)
        return make_mujoco_sim(model, self.num_envs, backend, device, threads)

    def make_spec(self):
        """What the policy sees and does; 2 physics steps per action, 4 s per episode."""
        angles, cos_sin = ("shoulder", "elbow"), ("cos 1", "cos 2", "sin 1", "sin 2")
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={
                "actor": (
                    ObsTerm(name="angle", kind="signal", size=4, labels=cos_sin),
                    ObsTerm(name="speed", kind="signal", size=2, unit="rad/s", labels=angles),
                    ObsTerm(name="to_target", kind="signal", size=2, unit="m", labels=("x", "y")),
                )
            },
            action=tuple(ActionDim(name=a, low=-1.0, high=1.0) for a in angles),
            physics_dt=self.sim.physics_dt,
            step_dt=0.02,
            max_episode_steps=200,
        )

    def prepare(self):
        """Memory of each environment."""
        self.target = self.remember("target", torch.zeros(self.num_envs, 2, dtype=self.sim.dtype))

    def begin(self, rows):
        """A new target and a new pose, drawn for exactly these environments."""
        angle = self.uniform("pose", rows, 3, -3.14, 3.14)
        distance = self.uniform("distance", rows, 1, *self.config.distance)
        self.sim.qpos[rows] = angle[:, :2]
        self.target[rows] = distance * torch.stack([angle[:, 2].cos(), angle[:, 2].sin()], 1)

    def to_target(self, rows):
        """From hand to target (n, 2) [m]."""
        first, both = self.sim.qpos[rows, 0], self.sim.qpos[rows].sum(1)
        hand = torch.stack([first.cos() + both.cos(), first.sin() + both.sin()], 1) / 2
        return self.target[rows] - hand

    def observe_terms(self, rows):
        """Raw values by term name."""
        angle = self.sim.qpos[rows]
        return {
            "angle": torch.cat([angle.cos(), angle.sin()], 1),
            "speed": self.sim.qvel[rows],
            "to_target": self.to_target(rows),
        }

    def apply_action(self, action):
        """Torques; the motors clamp them."""
        self.sim.ctrl[:] = action

    def reward_terms(self, action):
        """Their sum is the reward."""
        near = torch.exp(-10 * self.to_target(slice(None)).norm(dim=1))
        return {"near": near, "effort": -0.01 * action.double().square().sum(1)}


# ... to here.


def main() -> None:
    """Check the task, train on it, evaluate what was learnt."""
    parser = argparse.ArgumentParser(description="Check a task and train on it.")
    parser.add_argument("--total-steps", type=int, default=300_000, help="env steps")
    parser.add_argument("--run-dir", default="runs/reach", help="run folder")
    args = parser.parse_args()
    torch.set_num_threads(1)

    def make(num_envs, seed):
        return Reach(num_envs=num_envs, seed=seed)

    print(ctrl_rl.check_env(make))
    config = ctrl_rl.ppo.PPOConfig(total_steps=args.total_steps, num_steps=32)
    ctrl_rl.ppo.train(config, make(64, seed=0), ctrl_rl.Run(args.run_dir))
    policy = ctrl_rl.load_policy(args.run_dir)
    result = ctrl_rl.evaluate(policy, make(20, seed=1), episodes=100)
    for name, metric in result.metrics.items():
        print(f"{name}: {metric}")


if __name__ == "__main__":
    main()
