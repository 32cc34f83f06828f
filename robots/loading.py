"""Bring your own robot: an MJCF or URDF file, checked before anything is trained on it.

A file that lacks what a policy must be able to rely on is refused with the whole list of what is
wrong, not one item per attempt. Arrays go by name: `joint_ids`, `actuator_ids` and
`sensor_columns` give the positions of names in a compiled model, whatever order its file has.

MuJoCo misreads rotated inertias of URDF links before 3.14; the package requires a newer one.
"""

import warnings
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

import mujoco

from robots.sim import mujoco_warnings

SCALAR_JOINTS = {int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)}
JOINT_DRIVES = {int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT)}

TOO_LIGHT = 2e-15
"""Mass [kg] and inertia [kg m^2] just above what the compiler demands of moving bodies."""


class ModelError(ValueError):
    """A robot file that cannot be used; one line with everything that is wrong."""


def load_robot(
    path: str | Path, *, joints: Sequence[str] | None = None, unlimited: Sequence[str] = ()
) -> mujoco.MjModel:
    """Compile a robot file.

    Args:
        path: `.xml` (MJCF) or `.urdf`.
        joints: names of the hinges and slides that the robot must have, in any order; None: any.
        unlimited: joints that may turn without end, such as wheels.

    Returns:
        The compiled model.

    Raises:
        ModelError: the file is unreadable; moving bodies lack inertia; joints lack limits or
            names; names do not match. All of them are listed.
    """
    path = Path(path)
    if path.suffix not in (".xml", ".urdf"):
        raise ModelError(f"{path}: a robot file ends with .xml (MJCF) or .urdf")
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    mujoco_warnings.install()
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ModelError(f"{path}: {_one_line(error)}") from None
    massless = _links_without_inertia(path) if path.suffix == ".urdf" else _massless(spec)
    wrong = [f"bodies without inertia: {', '.join(massless)}"] if massless else []
    wrong += _wrong_joints(spec, joints, unlimited)
    if not wrong:
        try:
            return spec.compile()
        except ValueError as error:
            wrong.append(_one_line(error))
    raise ModelError(f"{path}: {'; '.join(wrong)}")


def joint_ids(model: mujoco.MjModel, names: Sequence[str]) -> list[int]:
    """Ids of hinges and slides by name. Raises ModelError if names are missing or left over."""
    have = {
        model.joint(i).name: i for i in range(model.njnt) if int(model.jnt_type[i]) in SCALAR_JOINTS
    }
    _same_names("joints", names, have)
    return [have[name] for name in names]


def actuator_ids(model: mujoco.MjModel, joints: Sequence[str]) -> list[int]:
    """The actuator that drives each joint, by the joint's name.

    Raises:
        ModelError: a joint has no actuator or several, or an actuator drives none of them.
    """
    have: dict[str, int] = {}
    for i in range(model.nu):
        if int(model.actuator_trntype[i]) not in JOINT_DRIVES:
            raise ModelError(f"actuator {model.actuator(i).name!r} drives no joint")
        joint = model.joint(model.actuator_trnid[i, 0]).name
        if joint in have:
            raise ModelError(f"joint {joint!r} has more than one actuator")
        have[joint] = i
    _same_names("driven joints", joints, have)
    return [have[joint] for joint in joints]


def sensor_columns(model: mujoco.MjModel, names: Sequence[str]) -> list[int]:
    """Columns of `sensordata` that the sensors of these names fill, in this order.

    Raises:
        ModelError: a name is missing; sensors that are not asked for are no fault.
    """
    have = {model.sensor(i).name: i for i in range(model.nsensor)}
    missing = [name for name in names if name not in have]
    if missing:
        raise ModelError(f"no sensor {', '.join(missing)}; the model has {', '.join(have)}")
    columns = []
    for name in names:
        start, size = model.sensor_adr[have[name]], model.sensor_dim[have[name]]
        columns += range(start, start + size)
    return columns


def _wrong_joints(
    spec: mujoco.MjSpec, wanted: Sequence[str] | None, unlimited: Sequence[str]
) -> Iterator[str]:
    """What is wrong with the hinges and slides of a file."""
    joints = [j for j in spec.joints if int(j.type) in SCALAR_JOINTS]
    limited = {j.name for j in joints if _limited(j, bool(spec.compiler.autolimits))}
    nameless = sum(not j.name for j in joints)
    if nameless:
        yield f"{nameless} joints without a name"
    free = [j.name for j in joints if j.name and j.name not in {*limited, *unlimited}]
    if free:
        yield f"joints without limits: {', '.join(free)}"
    if wanted is not None:
        try:
            _same_names("joints", wanted, [j.name for j in joints if j.name])
        except ModelError as error:
            yield str(error)


def _limited(joint, autolimits: bool) -> bool:
    """As the compiler decides: said, or implied by a range unless the file forbids it."""
    if joint.limited == mujoco.mjtLimited.mjLIMITED_AUTO:
        return autolimits and joint.range[0] != joint.range[1]
    return bool(joint.limited)


def _same_names(what: str, wanted: Sequence[str], have) -> None:
    missing = [name for name in wanted if name not in have]
    extra = [name for name in have if name not in set(wanted)]
    said = [f"{what} missing: {', '.join(missing)}"] if missing else []
    said += [f"{what} not expected: {', '.join(extra)}"] if extra else []
    if said:
        raise ModelError("; ".join(said))


def _massless(spec: mujoco.MjSpec) -> list[str]:
    """Moving bodies of an MJCF file without mass and inertia, in themselves or welded to them.

    The compiler names one such body and stops. A copy that is allowed to be too light compiles, and
    a body on the lower bound has nothing of its own. A copy that fails for another reason tells
    nothing here; compiling the file itself says what it is.
    """
    copy = spec.copy()
    copy.compiler.autolimits = copy.compiler.balanceinertia = True
    copy.compiler.fusestatic, copy.compiler.settotalmass = False, -1
    for bound in ("boundmass", "boundinertia"):
        setattr(copy.compiler, bound, max(getattr(copy.compiler, bound), TOO_LIGHT))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # so light a body is close to singular
            model = copy.compile()
    except ValueError:
        return []
    light = (model.body_mass <= TOO_LIGHT) | (model.body_inertia.min(1) <= TOO_LIGHT)
    heavy = set(model.body_weldid[~light])
    return [
        model.body(i).name or f"body {i}"
        for i in range(1, model.nbody)
        if model.body_jntnum[i] and i not in heavy
    ]


def _links_without_inertia(path: Path) -> list[str]:
    """Links that a URDF moves without saying how heavy they are.

    Links fixed to one count as part of it, but not in the place of a shape: MuJoCo would guess the
    mass of a link with a shape and without inertia.
    """
    root = xml.etree.ElementTree.parse(path).getroot()
    links = {link.get("name", "?"): link for link in root.iter("link")}
    moving, fixed = [], {}
    for joint in root.findall("joint"):
        ends = {end.tag: end.get("link", "?") for end in joint}
        if joint.get("type") == "fixed":
            fixed.setdefault(ends["parent"], []).append(ends["child"])
        else:
            moving.append(ends["child"])

    def heavy(name: str) -> bool:
        return _says_inertia(links[name]) or (
            links[name].find("collision") is None and any(map(heavy, fixed.get(name, ())))
        )

    return [name for name in links if name in moving and not heavy(name)]


def _says_inertia(link: xml.etree.ElementTree.Element) -> bool:
    """Mass and moments of inertia are there and positive."""
    mass, inertia = link.find("inertial/mass"), link.find("inertial/inertia")
    if mass is None or inertia is None:
        return False
    values = [mass.get("value", "0"), *(inertia.get(k, "0") for k in ("ixx", "iyy", "izz"))]
    return all(float(value) > 0 for value in values)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
