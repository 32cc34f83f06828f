"""Writes a policy as one ONNX file with its card, after proving that both say the same.

The graph holds what stands between an observation and an action: normaliser, network and clip to
the action's bounds. Term scale, clip and history come before it (the runtime builds them from the
card), joint scale and offset after it.
"""

import json
import logging
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import ctrl_rl
from ctrl_rl import registry
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.commands.train import rebuild
from ctrl_rl.making import make
from ctrl_rl.policy import OnnxPolicy, Policy, load_policy
from ctrl_rl.runs import find_checkpoint, read_config
from sim2real.card import TOLERANCE, Card, action_difference
from sim2real.runtime import Network

OPSET = 18
REFERENCES = 16
"""Observations that the card carries."""
RECORD_ENVS, RECORD_STEPS = 16, 64
"""Environments and steps of the recording that the file is replayed against."""


class ExportError(ValueError):
    """The file would not do what the policy does, so it was not written."""


def export(
    policy: Policy | OnnxPolicy,
    path: str | Path,
    *,
    obs: Tensor | None = None,
    train_steps: int = 0,
    commit: str = "",
    task_config: dict | None = None,
) -> Card:
    """Write `path` and, beside it, the readable copy of its card with the suffix `.json`.

    Args:
        policy: it is left as it was.
        path: usually `policy.onnx`; replaced in one move, so that no reader sees half a file.
        obs: recorded observations (K, d) float32; None to record them in the policy's own task.
        train_steps: environment steps behind the weights.
        commit: of the training code.
        task_config: the task's configuration in training, as JSON values; None for its defaults.

    Raises:
        ExportError: the file's answers differ from the policy's by more than `TOLERANCE`.
        ValueError: a policy that reads another group than "actor".
    """
    path = Path(path)
    if isinstance(policy, OnnxPolicy):
        raise ValueError("the policy is an exported file already; copy it")
    if policy.group != "actor":
        raise ValueError(f"the policy reads {policy.group!r}; a robot only has 'actor'")
    task_config = task_config or {}
    recorded = record_obs(policy, task_config) if obs is None else obs
    obs = recorded[torch.isfinite(recorded).all(1)]
    if len(obs) == 0:
        raise ExportError("no recorded observation is finite; nothing was written")
    expected = _answers(policy.module, obs)
    picks = np.linspace(0, len(obs) - 1, min(REFERENCES, len(obs))).round().astype(int)
    card = Card(
        spec=policy.spec,
        train_steps=train_steps,
        version=ctrl_rl.__version__,
        commit=commit,
        task_config=task_config,
        reference_obs=obs[picks].numpy(),
        reference_actions=expected[picks],
    )
    model = build_graph(policy.module, policy.spec.obs_size())
    onnx.helper.set_model_props(model, card.metadata())
    data = model.SerializeToString(deterministic=True)
    _compare(data, card, policy.module, torch.cat([obs, _random_like(obs)]))
    _write(path, data)
    readable = json.dumps(json.loads(card.to_json()), indent=1)
    _write(path.with_suffix(".json"), readable.encode())
    return card


def export_run(
    run: str | Path, checkpoint: str | None = None, out: str | Path | None = None
) -> tuple[Path, Card]:
    """Export a checkpoint of a run folder; returns the file written and its card.

    Args:
        run: a run folder, or a `.pt` file of one.
        checkpoint: "last", "best" or a step number; None for best, or last without one.
        out: None for `policy.onnx` in the run folder.

    Raises:
        ValueError: no run folder, no such checkpoint, or a damaged one.
        ExportError: see `export`.
    """
    path = Path(run)
    if path.suffix != ".pt":
        path = find_checkpoint(path, checkpoint)
    elif checkpoint is not None:
        raise ValueError(f"{path} is a checkpoint already; leave --checkpoint out")
    folder = path.resolve().parent.parent
    out = folder / "policy.onnx" if out is None else Path(out)
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder")
    config = read_config(folder)
    card = export(
        load_policy(path),
        out,
        train_steps=load_checkpoint(path)["step"],
        commit=config["commit"] or "",
        task_config=config["task_config"],
    )
    return out, card


def record_obs(policy: Policy, task_config: dict) -> Tensor:
    """Observations (K, d) of the policy playing its own task, as evaluation plays it."""
    task = registry.load("tasks", policy.spec.task)
    config = rebuild(task.Config, task_config).evaluation()
    env = make(policy.spec.task, RECORD_ENVS, config=config, threads=1)
    obs, rows = env.reset(), []
    for _ in range(RECORD_STEPS):
        rows.append(obs["actor"])
        obs = env.step(policy(obs)).obs
    env.close()
    return torch.cat(rows)


def build_graph(module: nn.Module, obs_size: int) -> onnx.ModelProto:
    """The module as an ONNX graph `obs` (N, d) -> `actions`, with nothing of this machine in it."""
    was_training = module.training
    module.eval()
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)  # it reports the absence of torchvision
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the exporter about itself
            program = torch.onnx.export(
                module,
                (torch.zeros(2, obs_size),),
                input_names=["obs"],
                output_names=["actions"],
                dynamic_shapes=({0: torch.export.Dim("N")},),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    finally:
        exporter_log.setLevel(level)
        module.train(was_training)
    assert program is not None  # it is with dynamo=True
    model = program.model_proto
    # The exporter notes source lines and paths on every node: not needed, and not reproducible.
    for node in model.graph.node:
        del node.metadata_props[:]
    for values in (model.graph.input, model.graph.output, model.graph.value_info):
        for value in values:
            del value.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.checker.check_model(model, full_check=True)
    return model


@torch.no_grad()
def _answers(module: nn.Module, obs: Tensor) -> np.ndarray:
    return module(obs).numpy()


def _random_like(obs: Tensor) -> Tensor:
    """Random observations (512, d), twice as spread as the recorded ones."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(512, obs.shape[1], generator=generator)
    return obs.mean(0) + 2 * obs.std(0, correction=0) * noise


def _compare(data: bytes, card: Card, module: nn.Module, obs: Tensor) -> None:
    """Run the bytes as a robot would. Raises ExportError where they answer otherwise."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    network = Network(session, card.spec)
    difference = action_difference(network(obs.numpy()), _answers(module, obs))
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the exported graph differs from the policy by {difference:.2g} in action units "
            f"(at most {TOLERANCE:g}); nothing was written"
        )
    card.check(network)


def _write(path: Path, data: bytes) -> None:
    """Write to a temporary name, sync, rename."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
