"""From nothing to a verified Go1: wall clock of training, and what `ctrl-rl verify` says.

Each seed is one `ctrl-rl train` from a cold start: the compiler's cache is empty, and the clock
includes imports, compilation where it pays and the evaluation at the end. Then the exported file
is verified in plain single-robot MuJoCo, in a process of its own and outside the clock. "long"
trains four times as long and is held to tighter limits; with `CTRL_RL_SHIP=1` its file becomes
`examples/policies/go1-velocity-flat.onnx`.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.cells import ROOT, Cell, main, run_cli

TASK = "Go1-Velocity-Flat-v0"
SHIPPED = ROOT / "examples" / "policies" / "go1-velocity-flat.onnx"
TIGHT = {"max_falls": 0.0, "max_lin_error": 0.08, "max_ang_error": 0.1}

CELLS = [
    *(
        Cell(name=f"seed-{seed}", config={"seed": seed, "total_steps": None, "limits": {}})
        for seed in range(5)
    ),
    Cell(name="long", config={"seed": 0, "total_steps": 8_000_000, "limits": TIGHT}),
]


def measure(config: dict) -> dict:
    """Train, export, verify.

    Returns:
        `train_wall_s`, `env_steps`, `verify_passed`, each check of `verify` with its limit, its
        figures with intervals, and `gait`.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        cold = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled")}
        flags = ["--seed", str(config["seed"]), "--run-dir", str(run), "--eval-every", "0"]
        if config["total_steps"] is not None:
            flags += ["--total-steps", str(config["total_steps"])]
        start = time.perf_counter()
        run_cli("train", TASK, *flags, "--video-s", "0", environment=cold)
        wall = time.perf_counter() - start
        rows = (run / "metrics.csv").read_text().splitlines()
        run_cli("export", str(run))
        limits = [f"--{k.replace('_', '-')}={v}" for k, v in config["limits"].items()]
        found = run_cli("verify", str(run), *limits, statuses=(0, 1))
        result = {
            "train_wall_s": round(wall, 1),
            "env_steps": int(rows[-1].partition(",")[0]),
            "verify_passed": found["passed"],
            "checks": found["checks"],
            "metrics": found["metrics"],
            "gait": gait(run / "policy.onnx"),
        }
        if found["passed"] and config["limits"] and os.environ.get("CTRL_RL_SHIP"):
            SHIPPED.parent.mkdir(exist_ok=True)
            shutil.copyfile(run / "policy.onnx", SHIPPED)
    return result


def gait(path: Path) -> dict:
    """How the nominal robot walks at 1 m/s, over 4 s after 2 s of walking in.

    Returns:
        `duty`: share of the time that each foot is down; `diagonal`: share of the time in which
        diagonal feet agree and the two pairs differ, 1 for a perfect trot without double support;
        `lift_m`: median over steps of a foot's greatest height.
    """
    import torch

    import ctrl_rl
    from robots.tasks.go1_velocity import CONTACT_HEIGHT, Go1VelocityConfig

    config = Go1VelocityConfig().nominal()
    env = ctrl_rl.make(TASK, 8, config=config)
    policy = ctrl_rl.load_policy(path)
    heights = []
    obs = env.observe()
    for step in range(300):
        env.command[:] = torch.tensor([1.0, 0.0, 0.0])
        env.next_command[:] = 1 << 30
        obs = env.step(policy(obs)).obs
        if step >= 100:
            heights.append(env.observe_terms(slice(None))["foot_height"].clone())
    env.close()
    height = torch.stack(heights)  # (T, N, 4) in the order FR, FL, RR, RL
    down = height < CONTACT_HEIGHT
    pairs = (down[..., 0] == down[..., 3]) & (down[..., 1] == down[..., 2])
    trot = pairs & (down[..., 0] != down[..., 1])
    lifts = []
    for foot in height.flatten(1).T:
        peak = 0.0
        for h in foot.tolist():
            if h < CONTACT_HEIGHT:
                lifts += [peak] if peak else []
                peak = 0.0
            else:
                peak = max(peak, h)
    return {
        "duty": [round(x, 3) for x in down.double().mean((0, 1)).tolist()],
        "diagonal": round(trot.double().mean().item(), 3),
        "lift_m": round(sorted(lifts)[len(lifts) // 2], 4) if lifts else 0.0,
    }


if __name__ == "__main__":
    raise SystemExit(main("go1_walk", CELLS, measure))
