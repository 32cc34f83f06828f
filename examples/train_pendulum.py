"""Train, evaluate and load a policy from Python.

python examples/train_pendulum.py
"""

import argparse

import torch

import ctrl_rl


def main() -> None:
    """The four calls that everything else is made of."""
    parser = argparse.ArgumentParser(description="Train on Pendulum-v0 from Python.")
    parser.add_argument("--total-steps", type=int, default=200_000, help="env steps")
    parser.add_argument("--run-dir", default="runs/pendulum-from-python", help="run folder")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks are fastest on one

    env = ctrl_rl.make("Pendulum-v0", num_envs=64, seed=0)
    config = ctrl_rl.ppo.PPOConfig(total_steps=args.total_steps, gamma=0.95)
    ctrl_rl.ppo.train(config, env, ctrl_rl.Run(args.run_dir))

    policy = ctrl_rl.load_policy(args.run_dir)
    fresh = ctrl_rl.make("Pendulum-v0", num_envs=20, seed=1)
    result = ctrl_rl.evaluate(policy, fresh, episodes=100)
    for name, metric in result.metrics.items():
        print(f"{name}: {metric}")


if __name__ == "__main__":
    main()
