"""Writes a policy as one ONNX file with its card, after proving that both say the same.

The graph holds what stands between an observation and an action: normaliser, network and clip to
the action's bounds. Term scale, clip and history come before it (the runtime builds them from the
card), joint scale and offset after it. What a recurrent policy remembers is an input and an output
of its own; its proof replays whole sequences with resets in their midst.
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
from torch import Tensor

import ctrl_rl
from ctrl_rl import registry
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.commands.train import rebuild
from ctrl_rl.making import make
from ctrl_rl.policy import OnnxPolicy, Policy, PolicyModule, load_policy
from ctrl_rl.run_folder import find_checkpoint, read_config
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
        policy: it is left as it was, but for what it remembers of episodes: nothing.
        path: usually `policy.onnx`; replaced in one move, so that no reader sees half a file.
        obs: recorded observations (K, d) float32, of a policy with memory one episode's in order;
            None to record them in the policy's own task.
        train_steps: environment steps, or updates of an offline run, behind the weights.
        commit: of the training code.
        task_config: the task's configuration in training, as JSON values; None for its defaults.

    Raises:
        ExportError: the file's answers differ from the policy's by more than `TOLERANCE`.
        ValueError: a policy that reads another group than "actor", or is no network alone.
    """
    path = Path(path)
    if isinstance(policy, OnnxPolicy):
        raise ValueError("the policy is an exported file already; copy it")
    if not isinstance(policy, Policy):  # of another package, see `ctrl_rl.registry`
        raise ValueError(
            f"a {policy.section()['kind']} policy is played with ctrl-rl eval or ctrl_rl.evaluate, "
            "not exported: it is no network from observation to action"
        )
    if policy.group != "actor":
        raise ValueError(f"the policy reads {policy.group!r}; a robot only has 'actor'")
    task_config = task_config or {}
    module = policy.module
    recorded = record_obs(policy, task_config) if obs is None else (obs[:, None], _no_begins(obs))
    recorded, begins = _finite(*recorded, bool(module.states))
    if recorded.numel() == 0:
        raise ExportError("no recorded observation is finite; nothing was written")
    reference = _reference(recorded, begins, bool(module.states))
    card = Card(
        spec=policy.spec,
        train_steps=train_steps,
        version=ctrl_rl.__version__,
        commit=commit,
        task_config=task_config,
        reference_obs=reference[:, 0].numpy(),
        reference_actions=_answers(module, reference, _no_begins(reference))[:, 0],
        recurrent=bool(module.states),
    )
    model = build_graph(module, policy.spec.obs_size())
    onnx.helper.set_model_props(model, card.metadata())
    data = model.SerializeToString(deterministic=True)
    _compare(data, card, module, recorded, begins)
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


def record_obs(policy: Policy, task_config: dict) -> tuple[Tensor, Tensor]:
    """The policy playing its own task, as evaluation plays it.

    Returns:
        Observations (T, N, d), and whether an episode begins with them (T, N) bool.
    """
    task = registry.load("tasks", policy.spec.task)
    config = rebuild(task.Config, task_config).evaluation()
    env = make(policy.spec.task, RECORD_ENVS, config=config, threads=1)
    obs, rows, begins = env.reset(), [], [torch.ones(RECORD_ENVS, dtype=torch.bool)]
    policy.reset()
    for _ in range(RECORD_STEPS):
        rows.append(obs["actor"])
        step = env.step(policy(obs))
        begins.append(step.terminated | step.truncated)
        policy.reset(begins[-1])
        obs = step.obs
    policy.reset()
    env.close()
    return torch.stack(rows), torch.stack(begins[:-1])


def _no_begins(obs: Tensor) -> Tensor:
    """Flags (T, 1) of one sequence that no episode interrupts."""
    return torch.zeros(len(obs), 1, dtype=torch.bool)


def _finite(obs: Tensor, begins: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Of `whole` sequences those that are finite, else the finite rows as one step (1, K, d)."""
    if whole:
        rows = obs.isfinite().all(2).all(0)
        return obs[:, rows], begins[:, rows]
    obs = obs.flatten(0, 1)
    obs = obs[obs.isfinite().all(1)][None]
    return obs, torch.zeros(obs.shape[:2], dtype=torch.bool)


def _reference(obs: Tensor, begins: Tensor, whole: bool) -> Tensor:
    """Observations for the card (K, 1, d): the first of an episode in order, or a spread of all."""
    if not whole:
        picks = np.linspace(0, obs.shape[1] - 1, min(REFERENCES, obs.shape[1])).round().astype(int)
        return obs[0, picks][:, None]
    ends = begins[1:REFERENCES, 0].nonzero()
    return obs[: int(ends[0]) + 1 if len(ends) else REFERENCES, :1]


def build_graph(module: PolicyModule, obs_size: int) -> onnx.ModelProto:
    """The module as an ONNX graph `obs` (N, d) -> `actions`, with nothing of this machine in it.

    With memory, `obs`, `h_in` (and `c_in`) -> `actions`, `h_out` (and `c_out`), states (1, N, H).
    """
    rows, names = torch.export.Dim("N"), module.states
    states = tuple(module.start(2).split(1)) if names else ()
    dynamic = ({0: rows}, ({1: rows},) * len(names)) if names else ({0: rows},)
    was_training = module.training
    module.eval()
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)  # it reports the absence of torchvision
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the exporter about itself
            # About torch's own recurrent layers, and about one name for the rows of all inputs.
            warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights")
            warnings.filterwarnings("ignore", "# The axis name: N will not be used")
            program = torch.onnx.export(
                module,
                (torch.zeros(2, obs_size), *states),
                input_names=["obs", *(f"{name}_in" for name in names)],
                output_names=["actions", *(f"{name}_out" for name in names)],
                dynamic_shapes=dynamic,
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
def _answers(module: PolicyModule, obs: Tensor, begins: Tensor) -> np.ndarray:
    """Actions for observations (T, N, d), one step after the other from a zero state.

    States are zeroed before observations that begin an episode, `begins` (T, N) bool.
    """
    states = module.start(obs.shape[1]).split(1) if module.states else ()
    actions = []
    for x, begin in zip(obs, begins, strict=True):
        for state in states:
            state[:, begin] = 0.0
        answer = module(x, *states)
        action, *states = answer if module.states else (answer,)
        actions.append(action.numpy())
    return np.stack(actions)


def _random_like(obs: Tensor) -> Tensor:
    """Random observations (T, N, d), twice as spread as the recorded ones; 512 if T is 1."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 512) if len(obs) == 1 else (len(obs), 16)
    noise = torch.randn(*shape, obs.shape[2], generator=generator)
    flat = obs.flatten(0, 1)
    return flat.mean(0) + 2 * flat.std(0, correction=0) * noise


def _compare(data: bytes, card: Card, module: PolicyModule, obs: Tensor, begins: Tensor) -> None:
    """Run the bytes as a robot would. Raises ExportError where they answer otherwise."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    network = Network(session, card)
    obs = torch.cat([obs, _random_like(obs)], 1)
    begins = torch.cat([begins, torch.zeros(len(obs), obs.shape[1] - begins.shape[1]).bool()], 1)
    if card.recurrent:
        begins[len(obs) // 2, ::2] = True  # a reset in the midst, whatever was recorded
    answers = []
    for x, begin in zip(obs.numpy(), begins.numpy(), strict=True):
        network.reset(begin)
        answers.append(network(x))
    difference = action_difference(np.stack(answers), _answers(module, obs, begins))
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the exported graph differs from the policy by {difference:.2g} in action units "
            f"(at most {TOLERANCE:g}); nothing was written"
        )
    card.check(network.fresh())


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
