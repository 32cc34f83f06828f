"""One GPU, unattended, under 8 minutes: speed, memory, agreement with MuJoCo C, Go1's time to walk.

    python -m benchmarks.gpu                          on a machine with an NVIDIA GPU
    python -m benchmarks.gpu --device cpu --quick     tries the script itself, on Warp's CPU device

Started again, it measures what is missing. The first run on a machine compiles kernels, which is
reported apart and counts towards the 8 minutes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import ctrl_rl
from benchmarks import cells, go1_walk
from benchmarks.cells import RESULTS, Absent, Cell

GO1, CHEETAH = "Go1-Velocity-Flat-v0", "HalfCheetah-v5"
BUDGET_S = 480
"""The whole of it [s]; a cell that might not fit is left for another run."""

QUICK_VERIFY = [
    *("--episodes=2", "--episode-s=2", "--command-s=1", "--settle-s=0.2", "--stand-s=1"),
]


def make_cells(device: str, quick: bool) -> list[Cell]:
    """What is measured, longest last."""
    shared = {"device": device, "seconds": 0.2 if quick else 5.0}
    speed = [
        Cell(
            name=f"speed-{label}-{num_envs}",
            config={"kind": "speed", "task": task, "num_envs": num_envs, "needs_s": 20, **shared},
        )
        for label, task in (("go1", GO1), ("halfcheetah", CHEETAH))
        for num_envs in ((4,) if quick else (1024, 2048, 4096, 8192, 16384))
    ]
    sorting = Cell(
        name="determinism-go1",
        config={
            "kind": "determinism",
            "num_envs": 4 if quick else 4096,
            "needs_s": 40,
            **shared,
        },
    )
    agreement = [
        Cell(
            name=f"agreement-{label}",
            config={
                "kind": "agreement",
                "task": task,
                "num_envs": 4 if quick else 256,
                "steps": 2 if quick else 50,
                "needs_s": 20,
                "device": device,
            },
        )
        for label, task in (("go1", GO1), ("halfcheetah", CHEETAH))
    ]
    walk = Cell(
        name="walk-go1",
        config={
            "kind": "walk",
            "num_envs": 4 if quick else 4096,
            "total_steps": 64 if quick else 12_000_000,
            "train": ["--eval-episodes=1", "--task.episode-length-s=0.2"] if quick else [],
            "verify": QUICK_VERIFY if quick else [],
            "needs_s": 200,
            "device": device,
        },
    )
    cells_ = [*speed[:1], *agreement[:1], *speed[1:], *agreement[1:], sorting, walk]
    return [Cell(name=f"quick-{c.name}", config=c.config) for c in cells_] if quick else cells_


def measure_speed(config: dict) -> dict:
    """Env steps per second through the whole environment, and of the physics alone; memory."""
    device = config["device"]
    before = used_mb(device)
    start = time.perf_counter()
    env = ctrl_rl.make(config["task"], config["num_envs"], backend="warp", device=device)
    actions = random_actions(env, 64)
    for action in actions[:16]:
        env.step(action)
    synchronize(device)
    first_s = time.perf_counter() - start
    n, decimation = config["num_envs"], env.spec.decimation
    index = iter(range(1 << 62))
    result = {
        "env_steps_per_s": rate(lambda: env.step(actions[next(index) % 64]), n, config),
        "physics_env_steps_per_s": rate(lambda: env.sim.step(decimation), n, config),
        "decimation": decimation,
        "make_and_first_steps_s": round(first_s, 2),
        "added_mb": round(used_mb(device) - before, 1),
        **env.sim.capacities(),
    }
    env.close()
    return result


def measure_determinism(config: dict) -> dict:
    """What the same bits in every run cost: physics of Go1 with and without."""
    from robots import go1
    from robots.sim.warp_backend import WarpSim

    result = {}
    for name, deterministic in (("deterministic", True), ("fast", False)):
        sim = WarpSim(
            go1.make_model(), config["num_envs"], config["device"], deterministic=deterministic
        )
        sim.qpos[:, 7:] = torch.tensor(go1.DEFAULT_JOINT_POS, device=sim.device)
        sim.ctrl[:] = torch.tensor(go1.DEFAULT_JOINT_POS, device=sim.device)
        for _ in range(50):
            sim.step(4)
        result[f"{name}_env_steps_per_s"] = rate(
            lambda sim=sim: sim.step(4), config["num_envs"], config
        )
        sim.close()
    return result


def measure_agreement(config: dict) -> dict:
    """One control step from the same states under random actions, against MuJoCo C.

    Errors are relative to the largest element of the world's vector where that exceeds 1. With
    few solver iterations (Go1 trains with 4) some steps end before the solver has converged, and
    there the two differ: see the 0.99 quantile and the maximum.
    """
    n = config["num_envs"]
    ours = ctrl_rl.make(config["task"], n, backend="warp", device=config["device"], seed=1)
    theirs = ctrl_rl.make(config["task"], n, seed=1)
    errors: dict[str, list[torch.Tensor]] = {"qpos": [], "qvel": [], "obs": [], "reward": []}
    for action in random_actions(ours, config["steps"]):
        copy_state(ours, theirs)
        a, b = ours.step(action), theirs.step(action.cpu())
        live = ~(b.terminated | b.truncated)
        errors["qpos"].append(relative_error(ours.sim.qpos, theirs.sim.qpos)[live])
        errors["qvel"].append(relative_error(ours.sim.qvel, theirs.sim.qvel)[live])
        for group, value in a.next_obs.items():
            errors["obs"].append(relative_error(value, b.next_obs[group]))
        errors["reward"].append(relative_error(a.reward[:, None], b.reward[:, None]))
    quantiles = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
    result = {}
    for name, parts in errors.items():
        values = torch.quantile(torch.cat(parts), quantiles).tolist()
        result[name] = dict(zip(("median", "q99", "max"), values, strict=True))
    ours.close()
    theirs.close()
    return result


def measure_walk(config: dict) -> dict:
    """`ctrl-rl train` on the device, then export and `ctrl-rl verify` in plain MuJoCo."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        start = time.perf_counter()
        go1_walk.ctrl_rl(
            *("train", GO1, "--backend", "warp", "--device", config["device"]),
            *("--num-envs", str(config["num_envs"]), "--total-steps", str(config["total_steps"])),
            *("--run-dir", run, "--eval-every", "0", "--video-s", "0", *config["train"]),
        )
        wall = time.perf_counter() - start
        go1_walk.ctrl_rl("export", run)
        found = go1_walk.ctrl_rl("verify", run, *config["verify"], statuses=(0, 1))
    return {
        "train_wall_s": round(wall, 1),
        "verify_passed": found["passed"],
        "checks": found["checks"],
    }


MEASURES = {
    "speed": measure_speed,
    "determinism": measure_determinism,
    "agreement": measure_agreement,
    "walk": measure_walk,
}


def copy_state(source, target) -> None:
    """A MuJoCo C environment continues where a Warp one is; float32 is exact in float64."""
    sim, state = target.sim, source.sim.state_dict()
    for name, value in state["expanded"].items():
        sim.expand(name).copy_(value)
    for name in ("qpos", "qvel", "ctrl", "time"):
        getattr(sim, name).copy_(state["state"][name])
    if "history" in state["state"]:
        sim._history.copy_(state["state"]["history"])
    if state["expanded"]:
        sim.commit()
    for name, value in state["fields"].items():
        sim.field(name).copy_(value)
    for name, value in source.memory.items():
        target.memory[name].copy_(value)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """(N,) largest error of each world, relative to its largest element where that exceeds 1."""
    ours, theirs = ours.cpu().double().flatten(1), theirs.double().flatten(1)
    return (ours - theirs).abs().amax(1) / theirs.abs().amax(1).clamp(min=1)


def random_actions(env, count: int) -> torch.Tensor:
    """(count, N, A) uniform within the bounds, within [-1, 1] where there are none."""
    generator = torch.Generator().manual_seed(0)
    low = torch.tensor([d.low for d in env.spec.action]).clamp(min=-1)
    draw = 2 * torch.rand(count, env.num_envs, len(low), generator=generator) - 1
    return (draw * low.abs()).to(env.device)


def rate(step, num_envs: int, config: dict) -> float:
    """Env steps per second: median of five windows that fill the cell's seconds."""
    rates = []
    for _ in range(5):
        synchronize(config["device"])
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < config["seconds"] / 10:
            for _ in range(4):
                step()
            count += 4
            synchronize(config["device"])
        rates.append(count * num_envs / (time.perf_counter() - start))
    return round(statistics.median(rates), 1)


def synchronize(device: str) -> None:
    """Wait for the GPU, so that a clock tells the truth."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def used_mb(device: str) -> float:
    """GPU memory in use by everyone, Warp's pools and graphs included [MB]; 0 on the CPU."""
    if device == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 1e6


def main(argv: list[str] | None = None) -> int:
    """Parse the few flags and hand the rest to `benchmarks.cells`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", add_help=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args, rest = parser.parse_known_args(argv)
    if args.device == "cpu" and not args.quick:
        print("the CPU is for trying the script only; add --quick", file=sys.stderr)
        return 2
    if args.device != "cpu" and not torch.cuda.is_available():
        print("no GPU here; try the script with --device cpu --quick", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    begin = time.perf_counter()

    def measure(config: dict) -> dict:
        left = BUDGET_S - (time.perf_counter() - begin)
        if left < config["needs_s"] and not args.quick:
            raise Absent(f"{left:.0f} s of {BUDGET_S} are left; start again, done cells are kept")
        return MEASURES[config["kind"]](config)

    return cells.main("gpu", make_cells(args.device, args.quick), measure, rest, args.results)


if __name__ == "__main__":
    raise SystemExit(main())
