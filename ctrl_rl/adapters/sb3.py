"""stable-baselines3 both ways: our environments for its learners, its saved policies for our tools.

`vec_env` needs the extra `sb3`. `load_policy` reads what that library saved without it and without
running anything in it: the archive's `data` is JSON with pickled parts, of which the plain parts
alone are read; weights come through `torch.load(weights_only=True)`; a saved `VecNormalize` is a
pickle, read by an unpickler that builds nothing (`_Record`).

Which network it is, the tensors say by name and shape:

    PPO, A2C   mlp_extractor.policy_net.{0, 2, ...}, action_net, log_std    clipped, or choices
    SAC        actor.latent_pi.{0, 2, ...}, actor.mu, actor.log_std         squashed
    TD3, DDPG  actor.mu.{0, 2, ...}                                         squashed

Reading order: `vec_env` -> `load_policy`, `read_section` -> the archive -> `read_normalizer`.
"""

import dataclasses
import io
import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ctrl_rl import checkpoints
from ctrl_rl.networks import ACTIVATIONS
from ctrl_rl.policy import FORMAT, Policy
from ctrl_rl.provenance import provenance
from ctrl_rl.spec import Discrete, EnvSpec

POLICY_MODULES = tuple(f"stable_baselines3.{name}.policies" for name in ("common", "sac", "td3"))
"""Where the policy classes stand whose parts are known here."""

TORCH_ACTIVATIONS = {"ELU": "elu", "ReLU": "relu", "Tanh": "tanh"}
"""Class of torch.nn -> key of `ACTIVATIONS`."""


def vec_env(env, action_bound: float | None = None):
    """One of our environments as stable-baselines3's `VecEnv`, see `sb3_vec_env.TaskVecEnv`.

    Args:
        env: as `ctrl_rl.make` gives it.
        action_bound: bound of the elements of the action that have none, in their own units.

    Raises:
        ValueError: stable-baselines3 is not installed, or the action has no bounds.
    """
    try:
        import stable_baselines3  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("this needs the extra 'sb3': pip install 'ctrl-rl[sb3]'") from error
    from ctrl_rl.adapters.sb3_vec_env import TaskVecEnv

    return TaskVecEnv(env, action_bound)


def load_policy(
    path: str | Path,
    task: str | EnvSpec,
    normalizer: str | Path | None = None,
    activation: str | None = None,
) -> Policy:
    """A policy saved by stable-baselines3, as `ctrl_rl.load_policy` gives ours.

    Args:
        path: what `model.save` wrote, `model.zip`.
        task: id of the task it was trained on, or its spec.
        normalizer: what `VecNormalize.save` wrote; None for a policy trained without.
        activation: "elu", "relu" or "tanh"; None to read it from the archive.

    Raises:
        ValueError: not such a file, a network other than the ones above, or one that does not fit
            the task.
    """
    if isinstance(task, str):
        from ctrl_rl.making import make

        env = make(task, 1)
        env.close()
        task = env.spec
    assert isinstance(task, EnvSpec)
    return _policy(path, read_section(path, task, normalizer, activation)[0])


def import_run(
    path: str | Path,
    task: str,
    folder: str | Path,
    normalizer: str | Path | None = None,
    activation: str | None = None,
) -> tuple[Policy, int]:
    """Make a run folder that `ctrl-rl eval`, `play`, `export` and `verify` take.

    Args:
        path: as for `load_policy`.
        task: id of the task it was trained on, with its default configuration.
        folder: to make; an existing one must be empty.
        normalizer: as for `load_policy`.
        activation: as for `load_policy`.

    Returns:
        The policy, and the env steps it was trained for.

    Raises:
        ValueError: as `load_policy`, or the folder holds something or cannot be written.
    """
    from ctrl_rl.making import make

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; choose another")
    env = make(task, 1)
    config = dataclasses.asdict(env.config) if hasattr(env, "config") else {}
    env.close()
    section, data = read_section(path, env.spec, normalizer, activation)
    policy, steps = _policy(path, section), int(data["num_timesteps"])
    record = {
        "format": checkpoints.FORMAT,
        "task": task,
        "algo": "stable-baselines3",
        "run": {"seed": data.get("seed"), "num_envs": data.get("n_envs")},
        "algo_config": {"file": Path(path).name, "version": data["sb3_version"]},
        "task_config": config,
        "metrics": {},
        "spec": json.loads(env.spec.to_json()),
        **provenance(),
    }
    checkpoints.make_folder(folder / "checkpoints")
    checkpoints.write_text(folder / "config.json", json.dumps(record, indent=1) + "\n")
    for name in (f"step-{steps}", "best"):
        content = {"step": steps, "policy": section}
        checkpoints.save_checkpoint(folder / "checkpoints" / f"{name}.pt", content)
    return policy, steps


def read_section(
    path: str | Path,
    spec: EnvSpec,
    normalizer: str | Path | None = None,
    activation: str | None = None,
) -> tuple[dict, dict]:
    """The policy section (see `ctrl_rl.policy`) of a saved model, and the archive's plain data.

    Arguments and errors as for `load_policy`.
    """
    data, weights = read_archive(Path(path))
    try:
        section = _section(data, weights, spec, activation)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__} {error}"
        raise ValueError(f"{path} is not a model as stable-baselines3 saves it: {what}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    _check_normalizer(data, normalizer, path)
    if normalizer is not None:
        section["normalizer"] = read_normalizer(normalizer)
        width = len(section["normalizer"]["mean"]) if section["normalizer"] else spec.obs_size()
        if width != spec.obs_size():
            raise ValueError(
                f"{normalizer} has statistics of {width} columns, {spec.task} {spec.obs_size()}"
            )
    return section, data


def _check_normalizer(data: dict, normalizer: str | Path | None, path: str | Path) -> None:
    """A trained PPO or A2C keeps its first observation as it was before a VecNormalize."""
    if data.get("_last_obs") is None or "rollout_buffer_class" not in data:
        return  # never trained, or off-policy: the archive does not say
    wrapped = data.get("_last_original_obs") is not None
    if wrapped and normalizer is None:
        raise ValueError(
            f"{path} was trained behind a VecNormalize; give the file that its save wrote"
        )
    if normalizer is not None and not wrapped:
        raise ValueError(f"{path} was trained without a VecNormalize, {normalizer} is not its own")


def _policy(path: str | Path, section: dict) -> Policy:
    """The policy; an error names the file."""
    try:
        return Policy.from_section(section)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# The archive ----------------------------------------------------------------------------------


def read_archive(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Plain data and the policy's weights of a saved model; no code in it is run.

    Raises:
        ValueError: no such file, or none of stable-baselines3's.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
            weights = torch.load(
                io.BytesIO(archive.read("policy.pth")), map_location="cpu", weights_only=True
            )
            data["sb3_version"] = archive.read("_stable_baselines3_version").decode().strip()
    except pickle.UnpicklingError:  # torch would advise to run whatever is in it
        raise ValueError(f"{path}: policy.pth holds something other than tensors") from None
    except Exception as error:  # zipfile, json and torch each raise kinds of their own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is not a model that stable-baselines3 saved: {reason}") from None
    return data, weights


def _section(data: dict, weights: dict, spec: EnvSpec, activation: str | None) -> dict:
    """The section without statistics."""
    module = data["policy_class"]["__module__"]
    kwargs = data.get("policy_kwargs") or {}
    if module not in POLICY_MODULES:
        raise ValueError(f"its policy is a class of {module}; known are those of MlpPolicy")
    if data.get("use_sde"):
        raise ValueError("a policy with state-dependent exploration (use_sde) is not supported")
    extractor = str(kwargs.get("features_extractor_class", "FlattenExtractor"))
    if "FlattenExtractor" not in extractor:
        raise ValueError(f"its feature extractor {extractor} is not supported")
    _check_obs(data["observation_space"], spec)
    limits = _limits(data["action_space"], spec)
    if "action_net.weight" in weights:
        chain, last = _sequence(weights, "mlp_extractor.policy_net"), ["action_net"]
        others, default = ("log_std", "mlp_extractor.value_net.", "value_net."), "tanh"
        if isinstance(spec.action, Discrete):
            found = {"kind": "categorical_mlp", "bound": "none"}
        else:
            found = {"kind": "gaussian_mlp", "bound": "clip", "log_std": weights["log_std"]}
    elif "actor.mu.weight" in weights:
        chain, last = _sequence(weights, "actor.latent_pi"), ["actor.mu", "actor.log_std"]
        others, default = ("critic.", "critic_target."), "relu"
        found = {"kind": "squashed_gaussian_mlp", "bound": "tanh"}
    elif "actor.mu.0.weight" in weights:
        *chain, end = _sequence(weights, "actor.mu")
        last = [end]
        others, default = ("actor_target.", "critic.", "critic_target."), "relu"
        noise_std = torch.zeros(spec.action_size)  # it stands in a pickled part
        found = {"kind": "deterministic_mlp", "bound": "tanh", "noise_std": noise_std}
    else:
        raise ValueError("it is not an MlpPolicy of PPO, A2C, SAC, TD3 or DDPG")
    parts = ("weight", "bias")
    used = {f"{layer}.{part}" for layer in (*chain, *last) for part in parts}
    for name in weights:
        if name not in used and not name.startswith(others):
            raise ValueError(f"{name} belongs to no network that is known here")
    layers = {
        f"layers.{i}.{part}": torch.cat([weights[f"{name}.{part}"] for name in names]).float()
        for i, names in enumerate((*([layer] for layer in chain), last))
        for part in parts
    }
    sizes = _sizes(layers, len(last), spec)
    return {
        "format": FORMAT,
        "spec": spec.to_json(),
        "group": "actor",
        "hidden": sizes[1:-1],
        "activation": _activation(kwargs, activation, default),
        "normalizer": None,
        "weights": layers,
        **found,
        **({} if limits is None else {"limits": limits}),
    }


def _sequence(weights: dict, prefix: str) -> list[str]:
    """Names of a Sequential's linear layers, between which there are activations alone.

    Raises:
        ValueError: other modules stand between them.
    """
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.weight")
    places = sorted(int(m[1]) for m in map(pattern.fullmatch, weights) if m)
    if places != list(range(0, 2 * len(places), 2)):
        raise ValueError(f"layers at {places} of {prefix}: more than activations between them")
    return [f"{prefix}.{i}" for i in places]


def _sizes(layers: dict[str, Tensor], heads: int, spec: EnvSpec) -> list[int]:
    """Widths from observation to action."""
    shapes = [tuple(value.shape) for name, value in layers.items() if name.endswith("weight")]
    sizes = [shapes[0][1], *(shape[0] for shape in shapes)]
    actions = sizes[-1] // heads
    if (sizes[0], actions) != (spec.obs_size(), spec.action_size):
        raise ValueError(
            f"it maps {sizes[0]} observations to {actions} actions; "
            f"{spec.task} has {spec.obs_size()} and {spec.action_size}"
        )
    return sizes


def _activation(kwargs: dict, given: str | None, default: str) -> str:
    """A key of `ACTIVATIONS`: as the archive's text says, else as given."""
    text = kwargs.get("activation_fn")
    match = re.fullmatch(r"<class 'torch\.nn\.modules\.activation\.(\w+)'>", str(text))
    read = default if text is None else TORCH_ACTIVATIONS.get(match[1]) if match else None
    if match and read is None:
        raise ValueError(f"activation {match[1]} is none of {', '.join(ACTIVATIONS)}")
    if given is not None and given not in ACTIVATIONS:
        raise ValueError(f"unknown activation {given!r}; known: {', '.join(ACTIVATIONS)}")
    if read is None and given is None:
        raise ValueError(f"its activation cannot be read from {text!r}; name it")
    if None not in (read, given) and read != given:
        raise ValueError(f"its activation is {read}, not {given}")
    return read or given or default


def _check_obs(space: dict, spec: EnvSpec) -> None:
    """Refuse any observation but one vector of numbers, as wide as the group "actor"."""
    if ".box.Box'" not in space[":type:"] or "float" not in str(space["dtype"]):
        raise ValueError(f"it observes a {space[':type:']} of {space.get('dtype')}, not numbers")
    if list(space["_shape"]) != [spec.obs_size()]:
        raise ValueError(
            f"it observes {space['_shape']} numbers, {spec.task} gives {spec.obs_size()}"
        )


def _limits(space: dict, spec: EnvSpec) -> dict | None:
    """The section's "limits": bounds that the task leaves open; the others must be equal."""
    discrete = isinstance(spec.action, Discrete)
    if (".discrete.Discrete'" if discrete else ".box.Box'") not in space[":type:"]:
        raise ValueError(f"its action is a {space[':type:']}, unlike that of {spec.task}")
    if isinstance(spec.action, Discrete):
        if int(space.get("start", 0)) != 0:
            raise ValueError(f"its choices begin at {space['start']}, not at 0")
        return None
    bounds = [[dim.low for dim in spec.action], [dim.high for dim in spec.action]]
    ours = np.array(bounds, np.float32)
    theirs = np.stack([_numbers(space["low"]), _numbers(space["high"])])
    if theirs.shape != ours.shape:
        raise ValueError(f"its action has {theirs.shape[1]} elements, {spec.task} {ours.shape[1]}")
    wrong = np.isfinite(ours) & (np.abs(ours - theirs) > 1e-6 * np.abs(ours))
    for k, dim in enumerate(spec.action):
        if wrong[:, k].any():
            low, high = theirs[:, k]
            raise ValueError(
                f"it was trained with {dim.name} in [{low:g}, {high:g}], {spec.task} has "
                f"[{dim.low:g}, {dim.high:g}]"
            )
    if np.isfinite(ours).all():
        return None
    limits = np.where(np.isfinite(ours), ours, theirs)
    return {"low": torch.from_numpy(limits[0]), "high": torch.from_numpy(limits[1])}


def _numbers(text: str) -> np.ndarray:
    """The numbers of a printed float32 vector; numpy prints as many digits as tell them apart."""
    if "..." in text:
        raise ValueError("its action has more bounds than the archive shows")
    return np.array([float(word) for word in text.strip("[]").split()], np.float32)


# Statistics -----------------------------------------------------------------------------------


def read_normalizer(path: str | Path) -> dict | None:
    """Observation statistics of a saved `VecNormalize`, as they stand in a policy section.

    The pickle is taken apart, and nothing that it names is imported, built or called.

    Returns:
        None where it leaves observations alone (`norm_obs=False`).

    Raises:
        ValueError: no such file, or another object.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        state = _Reader(io.BytesIO(path.read_bytes())).load().state
        if not state["norm_obs"]:
            return None
        statistics = state["obs_rms"].state
        return {
            "mean": torch.from_numpy(_array(statistics["mean"])),
            "var": torch.from_numpy(_array(statistics["var"])),
            "count": torch.tensor(float(statistics["count"]), dtype=torch.float64),
            "clip": float(state["clip_obs"]),
            "epsilon": float(state["epsilon"]),
        }
    except Exception as error:  # an unpickler raises whatever the bytes make it stumble over
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is not a VecNormalize as it saves itself: {reason}") from None


class _Record:
    """Stands in for every object of a pickle: keeps what it would be made of, does nothing."""

    name = ""

    def __new__(cls, *args, **kwargs):
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __setstate__(self, state) -> None:
        self.state = state

    def __setitem__(self, key, value) -> None:
        pass


class _Reader(pickle.Unpickler):
    """An unpickler for which every name is a `_Record` of its own."""

    def find_class(self, module: str, name: str):
        return type(name, (_Record,), {"name": f"{module}.{name}"})


def _array(record) -> np.ndarray:
    """A float64 vector out of what numpy writes for it, in either of its two ways."""
    if record.name.endswith("multiarray._reconstruct"):
        _, shape, dtype, _, data = record.state
    elif record.name.endswith("numeric._frombuffer"):
        data, dtype, shape, _ = record.args
    else:
        raise ValueError(f"its statistics are a {record.name}")
    code = dtype.state[1] + dtype.args[0]
    if code not in ("<f8", "<f4") or len(shape) != 1:
        raise ValueError(f"its statistics are {code} of shape {shape}")
    return np.frombuffer(bytes(data), code).reshape(shape).astype(np.float64)
