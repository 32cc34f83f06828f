"""Make a run folder of a policy that stable-baselines3 saved, for eval, play and export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class ImportSb3:
    """What to import and where to."""

    model: Annotated[Path, tyro.conf.Positional]
    """What `model.save` wrote, `model.zip`; an MlpPolicy. No code in it is run."""
    task: Annotated[str, tyro.conf.Positional]
    """Id of the task it was trained on, with its default configuration."""
    normalizer: Path | None = None
    """What `VecNormalize.save` wrote; None for a policy that was trained without."""
    activation: str | None = None
    """elu, relu or tanh, where the file does not say it; None to read it."""
    run_dir: Path | None = None
    """The folder to make; None for runs/TASK/sb3/NAME-OF-THE-FILE."""


def main(args: ImportSb3) -> dict:
    """Read, check against the task, write."""
    import torch

    torch.set_num_threads(1)
    from ctrl_rl.adapters.sb3 import import_run

    folder = args.run_dir or Path("runs") / args.task / "sb3" / args.model.stem
    policy, steps = import_run(args.model, args.task, folder, args.normalizer, args.activation)
    print(f"{folder}: {args.task}, {policy.section()['kind']}, {steps:,} env steps")
    if args.normalizer is None and policy.section()["bound"] == "tanh":
        print(
            "taken as trained without a VecNormalize: the file does not say; if not, name its own"
        )
    print(f"go on with: ctrl-rl eval {folder}")
    return {"task": args.task, "run": str(folder), "env_steps": steps}
