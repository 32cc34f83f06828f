"""A trained policy: observation in, action out, in the units `step` takes.

A *policy section* is the part of a checkpoint that describes it completely, in tensors and plain
values (`MLP` is `ctrl_rl.networks.MLP`):

    {"format": 1, "kind": one of `KINDS`, "spec": EnvSpec as JSON,
     "group": "actor", "hidden": [128, 128], "activation": "elu",
     "normalizer": {"mean", "var", "count", "clip", "epsilon"} | None,
     "bound": "clip" | "tanh" | "none", "weights": {"layers.0.weight": ...}}

    kind                     the network gives             sampled with            bound
    "gaussian_mlp"           mean (A,)                     "log_std" (A,)          clip, none
    "squashed_gaussian_mlp"  mean and log_std (2 A,)       log_std                 tanh
    "deterministic_mlp"      action before tanh (A,)       "noise_std" (A,)        tanh
    "categorical_mlp"        logits (n,)                   softmax                 none

"tanh" stretches to the bounds of each dimension (`ctrl_rl.distributions.squash`).

The observation statistics travel with the weights: a section without the key is refused, so that
a policy is never run on unscaled input by accident; `None` says that it was trained without.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.distributions import squash
from ctrl_rl.env import Obs
from ctrl_rl.networks import MLP
from ctrl_rl.normalize import Normalizer
from ctrl_rl.runs import find_checkpoint
from ctrl_rl.spec import Discrete, EnvSpec, spec_differences

FORMAT = 1
"""Version of the policy section; another one is refused."""

KINDS = ("gaussian_mlp", "squashed_gaussian_mlp", "deterministic_mlp", "categorical_mlp")

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of what a network gives as log_std (code of Haarnoja et al., 2018)."""

_KEYS = (
    "format",
    "kind",
    "spec",
    "group",
    "hidden",
    "activation",
    "normalizer",
    "bound",
    "weights",
)


class PolicyModule(nn.Module):
    """Normaliser, network and bound in one graph: obs (N, d) float32 -> action, what is exported.

    The action is (N, A) float32 within the spec's bounds, or (N,) int64 for `Discrete`.
    """

    low: Tensor
    """(A,) bounds, where the policy has some."""
    high: Tensor

    def __init__(self, section: dict, spec: EnvSpec) -> None:
        super().__init__()
        self.discrete = isinstance(spec.action, Discrete)
        self.kind, self.action_size = section["kind"], spec.action_size
        width = spec.obs_size(section["group"])
        saved = section["normalizer"]
        self.normalizer = None
        if saved is not None:
            self.normalizer = Normalizer(width, saved["clip"], saved["epsilon"])
            self.normalizer.load_state_dict({k: saved[k] for k in ("mean", "var", "count")})
        outputs = spec.action_size * (2 if self.kind == "squashed_gaussian_mlp" else 1)
        sizes = (width, *section["hidden"], outputs)
        # A generator of its own: building a policy must not move the global one.
        self.net = MLP(sizes, section["activation"], generator=torch.Generator())
        self.net.load_state_dict(section["weights"])
        self.bounds, self.squashed = False, section["bound"] == "tanh"
        if section["bound"] != "none" and not isinstance(spec.action, Discrete):
            low = torch.tensor([dim.low for dim in spec.action], dtype=torch.float32)
            high = torch.tensor([dim.high for dim in spec.action], dtype=torch.float32)
            self.bounds = bool((low.isfinite() | high.isfinite()).any())
            self.register_buffer("low", low)
            self.register_buffer("high", high)

    def head(self, obs: Tensor) -> Tensor:
        """The network's output, see the module's table."""
        return self.net(obs if self.normalizer is None else self.normalizer(obs))

    def bound(self, action: Tensor) -> Tensor:
        """Clip or squash to the spec's bounds, as the policy was trained."""
        if self.squashed:
            return squash(action, self.low, self.high)
        return torch.clamp(action, self.low, self.high) if self.bounds else action

    def forward(self, obs: Tensor) -> Tensor:
        """The deterministic action."""
        out = self.head(obs)
        return out.argmax(-1) if self.discrete else self.bound(out[:, : self.action_size])

    def sample(self, obs: Tensor, noise: Tensor, std: Tensor | None) -> Tensor:
        """An action as during training, from standard normal noise (N, A)."""
        out = self.head(obs)
        if self.kind == "squashed_gaussian_mlp":
            mean, log_std = out.chunk(2, -1)
            return self.bound(mean + log_std.clamp(*LOG_STD_RANGE).exp() * noise)
        if self.kind == "deterministic_mlp":
            return torch.clamp(self.bound(out) + std * noise, self.low, self.high)
        return self.bound(out + std * noise)


class Policy:
    """A policy built from its section; see the module's docstring.

    Attributes:
        spec: the environment it was trained on.
        group: the observation group it reads.
        module: `PolicyModule`, the very thing that is exported.
    """

    def __init__(self, section: dict, device: str | torch.device | None = None) -> None:
        missing = [key for key in _KEYS if key not in section]
        if missing:
            what = "observation statistics" if missing == ["normalizer"] else ", ".join(missing)
            raise ValueError(f"the policy section lacks {what}")
        if section["format"] != FORMAT:
            raise ValueError(
                f"policy format {section['format']} is not the {FORMAT} this version reads"
            )
        if section["kind"] not in KINDS:
            raise ValueError(f"unknown kind of policy {section['kind']!r}; known: {KINDS}")
        if not section["weights"]:
            raise ValueError("the policy section holds no weights")
        self._section = section
        self.spec = EnvSpec.from_json(section["spec"])
        self.group = section["group"]
        discrete = isinstance(self.spec.action, Discrete)
        if discrete != (section["kind"] == "categorical_mlp"):
            raise ValueError(f"a {section['kind']} policy cannot act in {self.spec.task}")
        self.device = torch.device(device or next(iter(section["weights"].values())).device)
        try:
            self.module = PolicyModule(section, self.spec)
        except RuntimeError as error:
            raise ValueError(f"weights or statistics do not fit: {_one_line(error)}") from None
        self.module.to(self.device).eval().requires_grad_(False)
        if (section["bound"] == "tanh") != (section["kind"] in KINDS[1:3]):
            raise ValueError(f"a {section['kind']} policy cannot have bound {section['bound']!r}")
        self._std = None
        if section["kind"] == "gaussian_mlp":
            self._std = section["log_std"].to(self.device).exp()
        elif section["kind"] == "deterministic_mlp":
            self._std = section["noise_std"].to(self.device)

    @classmethod
    def from_section(cls, section: dict, device=None) -> "Policy":
        """Build a policy, on the weights' device by default.

        Raises:
            ValueError: something is missing or does not fit.
        """
        return cls(section, device)

    def section(self) -> dict:
        """The section this was built from."""
        return self._section

    @torch.no_grad()
    def __call__(self, obs: Obs | Tensor) -> Tensor:
        """The deterministic action for obs (N, d), or for a dict that holds it.

        Raises:
            ValueError: group or width is not what the policy was trained on.
        """
        return self.module(read_group(obs, self.spec, self.group).to(self.device))

    @torch.no_grad()
    def sample(self, obs: Obs | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random action, as during training."""
        x = read_group(obs, self.spec, self.group).to(self.device)
        if self.module.discrete:
            return torch.multinomial(self.module.head(x).softmax(-1), 1, generator=generator)[:, 0]
        shape = (len(x), self.spec.action_size)
        noise = torch.randn(shape, generator=generator, device=self.device)
        return self.module.sample(x, noise, self._std)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget the memory of rows whose episode ended; a feed-forward policy has none."""


class OnnxPolicy:
    """An exported policy run by onnxruntime, with the same calls as `Policy`.

    Args:
        path: a file written by `ctrl-rl export`.

    Raises:
        ValueError: not an ONNX file, damaged, or without our card.
    """

    def __init__(self, path: str | Path) -> None:
        import onnxruntime

        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        try:
            self.session = onnxruntime.InferenceSession(
                path.read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises its own kinds, none of them public
            raise ValueError(f"{path} is damaged or not an ONNX file: {_one_line(error)}") from None
        text = self.session.get_modelmeta().custom_metadata_map.get("ctrl_rl_card")
        if text is None:
            raise ValueError(f"{path} was not exported by ctrl-rl: it has no ctrl_rl_card")
        self.card, self.spec = read_card(text, path)
        self.group = "actor"
        self.device = torch.device("cpu")

    def __call__(self, obs: Obs | Tensor) -> Tensor:
        """As `Policy.__call__`; the result lies on the CPU."""
        x = read_group(obs, self.spec, self.group).detach().cpu().float().numpy()
        return torch.from_numpy(self.session.run(["actions"], {"obs": x})[0])

    def sample(self, obs: Obs | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """An exported policy has no noise to sample."""
        raise ValueError("an exported policy is deterministic: it has no noise to sample")

    def reset(self, rows: Tensor | None = None) -> None:
        """A feed-forward policy has no memory."""


def read_card(text: str, path: Path) -> tuple[dict, EnvSpec]:
    """Card and spec out of an exported file's metadata."""
    import json

    try:
        card = json.loads(text)
        dict(card["task_config"])
        return card, EnvSpec.from_dict(card["spec"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its card is damaged: {_one_line(error)}") from None


def load_policy(path: str | Path, checkpoint: str | None = None) -> Policy | OnnxPolicy:
    """Load from a run folder, a checkpoint or an exported file.

    Args:
        path: a run folder, a `.pt` file of one, or `policy.onnx`.
        checkpoint: of a run folder, "best", "last" or a step number; None for best, or last
            where no evaluation has been made.

    Raises:
        ValueError: one line that says which file and why.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return OnnxPolicy(path)
    if path.suffix != ".pt":
        path = find_checkpoint(path, checkpoint)
    content = load_checkpoint(path)
    if "policy" not in content:
        raise ValueError(f"{path} holds no policy")
    try:
        return Policy.from_section(content["policy"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {_one_line(error)}") from None


def read_group(obs: Obs | Tensor, spec: EnvSpec, group: str) -> Tensor:
    """The tensor (N, d) a policy reads; groups go by name, never by position.

    Raises:
        ValueError: the group is missing, a group is unknown, or the width is another.
    """
    if isinstance(obs, Mapping):
        unknown = sorted(set(obs) - set(spec.obs))
        if group not in obs or unknown:
            raise ValueError(
                f"{spec.task}: the policy reads {group!r} of groups {sorted(spec.obs)}, "
                f"the observation has {sorted(obs)}"
            )
        obs = obs[group]
    width = spec.obs_size(group)
    if obs.ndim != 2 or obs.shape[1] != width:
        raise ValueError(
            f"{spec.task}: observation {group!r} must be (N, {width}), not {tuple(obs.shape)}"
        )
    return obs


def check_fits(policy: Policy | OnnxPolicy, spec: EnvSpec) -> None:
    """Refuse an environment whose observation or action is not what the policy was trained on.

    In the policy's own task rate and robot must be the same, too: else the task has changed since,
    or the file. The commands asked for may differ.

    Raises:
        ValueError: the first difference, by term or field name.
    """
    check_same_shape(policy.spec, spec, (policy.group,))
    if policy.spec.task == spec.task:
        mine = dataclasses.replace(policy.spec, command=spec.command)
        if different := spec_differences(mine, spec):
            raise ValueError(
                f"the policy was not trained on {spec.task} as it is installed here; first "
                f"difference, policy and task: {different[0]}"
            )


def check_same_shape(trained: EnvSpec, spec: EnvSpec, groups: Iterable[str]) -> None:
    """Refuse a spec whose observation groups or action differ from those of training.

    Names, kinds, sizes, order and scales count; noise and delay, which are training's own, do not.

    Raises:
        ValueError: the first difference, by term name.
    """
    fields = ("name", "size", "kind", "labels", "scale", "clip", "history")
    for group in groups:
        mine, theirs = (
            [tuple(getattr(t, f) for f in fields) for t in s.obs.get(group, ())]
            for s in (trained, spec)
        )
        for term, other in itertools.zip_longest(mine, theirs):
            if term != other:
                describe = lambda t: "nothing" if t is None else f"{t[0]} ({t[1]})"  # noqa: E731
                changed = _changed(fields, term or (), other or ())
                detail = (
                    f"has another {', '.join(changed)} of {term[0]} than {spec.task}"
                    if term and other and term[:2] == other[:2]
                    else f"observes {describe(term)} where {spec.task} has {describe(other)}"
                )
                raise ValueError(f"trained on {trained.task}, which {detail} in group {group!r}")
    if trained.action != spec.action:
        raise ValueError(f"trained on {trained.task}, whose action is not that of {spec.task}")


def _changed(fields: Iterable[str], a: tuple, b: tuple) -> list[str]:
    """Names of the fields whose values differ."""
    return [name for name, x, y in zip(fields, a, b, strict=False) if x != y]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 200 else text[:200] + " ..."
