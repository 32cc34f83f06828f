"""A trained policy: observation in, action out, in the units `step` takes.

A *policy section* is the part of a checkpoint that describes it completely, in tensors and plain
values (`ctrl_rl.networks.MLP`, or `ctrl_rl.memory.RecurrentNet` with "gru" and "lstm"):

    {"format": 1, "kind": one of `KINDS`, "spec": EnvSpec as JSON,
     "group": "actor", "hidden": [128, 128], "activation": "elu",
     "memory_size": 64, only with "gru" and "lstm", "guide_hidden": [256, 256], only with "guided",
     "normalizer": {"mean", "var", "count", "clip", "epsilon"} | None,
     "bound": "clip" | "tanh" | "none", "weights": {"layers.0.weight": ...},
     "limits": {"low", "high"} (A,), only of a policy with bounds where the spec has none}

    kind                     the network gives             sampled with            bound
    "gaussian_*"             mean (A,)                     "log_std" (A,)          clip, none
    "categorical_*"          logits (n,)                   softmax                 none
    "squashed_gaussian_mlp"  mean and log_std (2 A,)       log_std                 tanh
    "deterministic_mlp"      action before tanh (A,)       "noise_std" (A,)        tanh

* is mlp, gru or lstm, of a Gaussian also guided. "tanh" stretches to the bounds of each dimension
(`ctrl_rl.distributions.squash`).

The observation statistics travel with the weights: a section without the key is refused, so that
a policy is never run on unscaled input by accident; `None` says that it was trained without.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ctrl_rl import registry
from ctrl_rl.checkpoints import check_kinds, load_checkpoint
from ctrl_rl.distributions import squash
from ctrl_rl.env import Obs
from ctrl_rl.memory import CELLS, RecurrentNet
from ctrl_rl.networks import MLP, GuidedMLP
from ctrl_rl.normalize import Normalizer
from ctrl_rl.run_folder import find_checkpoint
from ctrl_rl.spec import Discrete, EnvSpec, spec_differences

FORMAT = 1
"""Version of the policy section; another one is refused."""

SQUASHED = ("squashed_gaussian_mlp", "deterministic_mlp")

KINDS = (
    *(f"{d}_{net}" for d in ("gaussian", "categorical") for net in ("mlp", *CELLS)),
    "gaussian_guided",
    *SQUASHED,
)

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of what a network gives as log_std (code of Haarnoja et al., 2018)."""

CARD_FORMAT = 1
"""Version of an exported file's card; another one is refused."""
CARD_TOLERANCE = 1e-5
"""Largest accepted difference of an action from the card's, relative to max(1, |action|)."""

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

    The action is (N, A) float32 within the spec's bounds, or (N,) int64 for `Discrete`. A network
    with memory also takes and gives a state for each of `states`, (1, N, H), zero at first.
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
        cell = self.kind.rpartition("_")[2]
        self.states = {"gru": ("h",), "lstm": ("h", "c")}.get(cell, ())
        # A generator of its own: building a policy must not move the global one.
        rest = {"activation": section["activation"], "generator": torch.Generator()}
        if self.states:
            self.net = RecurrentNet(cell, section["memory_size"], sizes, **rest)
        elif cell == "guided":
            self.net = GuidedMLP(section["guide_hidden"], sizes, **rest).double()
        else:
            self.net = MLP(sizes, **rest)
        self.net.load_state_dict(section["weights"])
        self.bounds, self.squashed = False, section["bound"] == "tanh"
        if section["bound"] != "none" and not isinstance(spec.action, Discrete):
            low = torch.tensor([dim.low for dim in spec.action], dtype=torch.float32)
            high = torch.tensor([dim.high for dim in spec.action], dtype=torch.float32)
            if limits := section.get("limits"):
                low, high = limits["low"], limits["high"]
            if self.squashed and not bool((low.isfinite() & high.isfinite()).all()):
                raise ValueError(f"the policy section lacks limits, and {spec.task} has no bounds")
            self.bounds = bool((low.isfinite() | high.isfinite()).any())
            self.register_buffer("low", low)
            self.register_buffer("high", high)

    def head(self, obs: Tensor, *state: Tensor):
        """The network's output, see the module's table.

        With memory, that and the state after it (C, N, H).
        """
        return self.net(obs if self.normalizer is None else self.normalizer(obs), *state)

    def decide(self, head: Tensor) -> Tensor:
        """The deterministic action for the network's output."""
        return head.argmax(-1) if self.discrete else self.bound(head[:, : self.action_size])

    def sample(self, head: Tensor, noise: Tensor, std: Tensor | None) -> Tensor:
        """An action as during training, from the network's output and normal noise (N, A)."""
        if self.kind == "squashed_gaussian_mlp":
            mean, log_std = head.chunk(2, -1)
            return self.bound(mean + log_std.clamp(*LOG_STD_RANGE).exp() * noise)
        assert std is not None
        if self.kind == "deterministic_mlp":
            return torch.clamp(self.bound(head) + std * noise, self.low, self.high)
        return self.bound(head + std * noise)

    def bound(self, action: Tensor) -> Tensor:
        """Clip or squash to the spec's bounds, as the policy was trained."""
        if self.squashed:
            return squash(action, self.low, self.high)
        return torch.clamp(action, self.low, self.high) if self.bounds else action

    def start(self, num_rows: int) -> Tensor:
        """The state of a policy with memory before the first observation, (C, num_rows, H)."""
        assert isinstance(self.net, RecurrentNet)
        return self.net.start(num_rows, next(self.net.parameters()).device)

    def forward(self, obs: Tensor, *state: Tensor):
        """The deterministic action; with memory, the action and the states after it."""
        if not self.states:
            return self.decide(self.head(obs))
        head, after = self.head(obs, torch.cat(state))
        return self.decide(head), *after.split(1)


class Memory:
    """What a recurrent policy remembers of each row: a state (C, N, H), zero at first.

    Args:
        start: `start(N)` gives the state of N new episodes; N is that of the first observation.
    """

    def __init__(self, start: Callable[[int], Tensor]) -> None:
        self.start = start
        self.state: Tensor | None = None

    def read(self, num_rows: int) -> Tensor:
        """The state (C, num_rows, H).

        Raises:
            ValueError: the rows are not those of the observations before.
        """
        if self.state is None:
            self.state = self.start(num_rows)
        if self.state.shape[1] != num_rows:
            raise ValueError(
                f"the policy remembers {self.state.shape[1]} rows, the observation has "
                f"{num_rows}; policy.reset() begins anew"
            )
        return self.state

    def reset(self, rows: Tensor | None) -> None:
        """Zero the state of some rows; None forgets all of them, and how many there were.

        Raises:
            ValueError: rows that are neither flags (N,) bool nor row numbers. Numbers that repeat
                are refused: they are a mask of 0 and 1.
        """
        if rows is None or self.state is None:
            self.state = None
            return
        if rows.dtype not in (torch.bool, torch.int64) or rows.ndim != 1:
            raise ValueError(f"rows must be bool flags or int64 numbers, not {rows.dtype}")
        if rows.dtype == torch.int64 and len(rows.unique()) != len(rows):
            raise ValueError("row numbers repeat; a mask of rows must be bool")
        self.state = self.state.clone()
        self.state[:, rows.to(self.state.device)] = 0.0


class Policy:
    """A policy built from its section; see the module's docstring.

    Attributes:
        spec: the environment it was trained on.
        group: the observation group it reads.
        module: `PolicyModule`, the very thing that is exported.
    """

    def __init__(self, section: dict, device: str | torch.device | None = None) -> None:
        if folders := section.get("seeds"):  # several seeds learned as one job
            raise ValueError(f"it holds several policies; name one of {', '.join(folders)}")
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
        if not isinstance(section["weights"], dict) or not section["weights"]:
            raise ValueError("the policy section holds no weights")
        extra = {key: section[key] for key in ("log_std", "noise_std") if key in section}
        for name, value in {**(section["normalizer"] or {}), **extra, **section["weights"]}.items():
            if isinstance(value, Tensor) and not bool(value.isfinite().all()):
                raise ValueError(f"policy weight {name} is not finite")
        self._section = section
        self.spec = EnvSpec.from_json(section["spec"])
        self.group = section["group"]
        discrete = isinstance(self.spec.action, Discrete)
        if discrete != section["kind"].startswith("categorical"):
            raise ValueError(f"a {section['kind']} policy cannot act in {self.spec.task}")
        self.device = torch.device(device or next(iter(section["weights"].values())).device)
        try:
            self.module = PolicyModule(section, self.spec)
        except RuntimeError as error:
            raise ValueError(f"weights or statistics do not fit: {_one_line(error)}") from None
        self.module.to(self.device).eval().requires_grad_(False)
        if (section["bound"] == "tanh") != (section["kind"] in SQUASHED):
            raise ValueError(f"a {section['kind']} policy cannot have bound {section['bound']!r}")
        self._std = None
        if section["kind"].startswith("gaussian"):
            self._std = section["log_std"].to(self.device).exp()
        elif section["kind"] == "deterministic_mlp":
            self._std = section["noise_std"].to(self.device)
        self._memory = Memory(self.module.start) if self.module.states else None

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

        A policy with memory remembers what it saw in each row until `reset`.

        Raises:
            ValueError: group or width is not what the policy was trained on, or N is not that of
                the observations a policy with memory saw before.
        """
        return self.module.decide(self._head(obs))

    @torch.no_grad()
    def sample(self, obs: Obs | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random action, as during training."""
        head = self._head(obs)
        if self.module.discrete:
            return torch.multinomial(head.softmax(-1), 1, generator=generator)[:, 0]
        shape = (len(head), self.spec.action_size)
        noise = torch.randn(shape, generator=generator, device=self.device)
        return self.module.sample(head, noise, self._std)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget what was seen in rows whose episode ended; a feed-forward policy has no memory.

        Args:
            rows: bool flags (N,), or row numbers; None for all rows, however many come next.
        """
        if self._memory is not None:
            self._memory.reset(rows)

    def _head(self, obs: Obs | Tensor) -> Tensor:
        """The network's output, which memory takes part in and takes in."""
        x = read_group(obs, self.spec, self.group).to(self.device)
        if self._memory is None:
            return self.module.head(x)
        head, self._memory.state = self.module.head(x, self._memory.read(len(x)))
        return head


class OnnxPolicy:
    """An exported policy run by onnxruntime, with the same calls as `Policy`.

    Args:
        path: a file written by `ctrl-rl export`.

    Raises:
        ValueError: not an ONNX file, damaged, without our card, a card of another format, inputs
            or outputs other than the card's, or answers other than its reference actions: what
            a robot's runtime refuses, too.
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
        self._memory = None
        try:
            self._check_graph()
            _, *states = self.session.get_inputs()
            self._states = [s.name.removesuffix("_in") for s in states]
            if states:
                size = states[0].shape[2]
                self._memory = Memory(lambda num_rows: torch.zeros(len(states), num_rows, size))
            self._check_answers()
        except ValueError as error:
            raise ValueError(f"{path}: {_one_line(error)}") from None
        except Exception as error:  # of onnxruntime: an input of another type, a node that fails
            raise ValueError(
                f"{path} does not run on its card's data: {_one_line(error)}"
            ) from None

    def _check_graph(self) -> None:
        """Refuse inputs and outputs that are not the card's."""
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        names = [v.name for v in inputs], [v.name for v in outputs]
        wanted = [
            (["obs", *(f"{s}_in" for s in states)], ["actions", *(f"{s}_out" for s in states)])
            for states in ((("h",), ("h", "c")) if self.card.get("recurrent") else ((),))
        ]
        if names not in wanted:
            known = " or ".join(map(str, wanted))
            raise ValueError(f"its inputs and outputs are {names}, by its card {known}")
        width = self.spec.obs_size(self.group)
        if isinstance(inputs[0].shape[0], int) or inputs[0].shape[1:] != [width]:
            raise ValueError(f"its obs is {inputs[0].shape}, its card's is (N, {width})")
        for value in (*inputs[1:], *outputs[1:]):
            one, rows, *size = value.shape
            if one != 1 or isinstance(rows, int) or size != inputs[1].shape[2:]:
                raise ValueError(f"its {value.name} is {value.shape}, not (1, N, H)")

    def _check_answers(self) -> None:
        """Refuse a network that does not give the card's reference actions."""
        obs = torch.tensor(self.card["reference_obs"], dtype=torch.float32)
        discrete = isinstance(self.spec.action, Discrete)
        kind = torch.int64 if discrete else torch.float32
        expected = torch.tensor(self.card["reference_actions"], dtype=kind)
        size = () if discrete else (self.spec.action_size,)
        if obs.ndim != 2 or expected.shape != (len(obs), *size):
            raise ValueError("its card is damaged: the reference arrays do not fit the spec")
        # With memory they are one episode's first observations, in order.
        answers = torch.cat([self(x) for x in obs.split(1 if self._memory else len(obs))])
        self.reset()
        if answers.shape != expected.shape or answers.dtype != kind:
            raise ValueError(f"its actions are {tuple(answers.shape)} of {answers.dtype}")
        error = (answers - expected).abs() / expected.abs().clamp(min=1)
        if not error.max() <= (0.0 if discrete else CARD_TOLERANCE):
            raise ValueError(
                f"its answers differ by {error.max():.2g} from the card's reference actions "
                f"(at most {CARD_TOLERANCE:g}): network and card are not of one export"
            )

    def __call__(self, obs: Obs | Tensor) -> Tensor:
        """As `Policy.__call__`; the result lies on the CPU."""
        x = read_group(obs, self.spec, self.group).detach().cpu().float()
        before = [] if self._memory is None else self._memory.read(len(x)).split(1)
        feeds = {f"{s}_in": v.numpy() for s, v in zip(self._states, before, strict=True)}
        names = ["actions", *(f"{s}_out" for s in self._states)]
        action, *after = self.session.run(names, {"obs": x.numpy(), **feeds})
        if self._memory is not None:
            self._memory.state = torch.cat([torch.from_numpy(x) for x in after])
        return torch.from_numpy(action)

    def sample(self, obs: Obs | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """An exported policy has no noise to sample."""
        raise ValueError("an exported policy is deterministic: it has no noise to sample")

    def reset(self, rows: Tensor | None = None) -> None:
        """As `Policy.reset`."""
        if self._memory is not None:
            self._memory.reset(rows)


def read_card(text: str, path: Path) -> tuple[dict, EnvSpec]:
    """Card and spec out of an exported file's metadata."""
    import json

    try:
        card = json.loads(text)
        found = card["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: its card is damaged: no JSON object with a format") from None
    if type(found) is not int or found != CARD_FORMAT:  # True and 1.0 equal 1
        raise ValueError(f"{path}: its card has format {found!r}, this version reads {CARD_FORMAT}")
    try:
        check_kinds(card, dict.fromkeys(("spec", "task_config"), dict), "it")
        check_kinds(card, dict.fromkeys(("reference_obs", "reference_actions"), list), "it")
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
    content = load_checkpoint(path, {"step": int, "policy": dict})
    try:
        kind = content["policy"].get("kind")
        if kind in registry.names("policies"):  # another package's, with the calls of `Policy`
            return registry.load("policies", kind).from_section(content["policy"])
        return Policy.from_section(content["policy"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
