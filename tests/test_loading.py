"""A user's robot file: what is refused, with which list; inertia of URDF links; order by name."""

import mujoco
import numpy as np
import pytest

from robots.loading import ModelError, actuator_ids, joint_ids, load_robot, sensor_columns

LINK = """<link name="{name}"><inertial><origin rpy="0 0 {yaw}"/><mass value="1"/>
  <inertia ixx="{i[0]}" iyy="{i[1]}" izz="{i[2]}" ixy="0" ixz="0" iyz="0"/></inertial></link>"""
JOINT = """<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>
  <origin rpy="0 0 {yaw}"/><axis xyz="1 0 0"/>{limit}</joint>"""
LIMIT = '<limit lower="-1" upper="1" effort="10" velocity="5"/>'
YAW = 1.5707963267948966


def urdf(tmp_path, *parts):
    path = tmp_path / "robot.urdf"
    path.write_text(f'<robot name="r"><link name="base"/>{"".join(parts)}</robot>')
    return path


def mjcf(tmp_path, body, more=""):
    path = tmp_path / "robot.xml"
    path.write_text(f"<mujoco><worldbody>{body}</worldbody>{more}</mujoco>")
    return path


def joint(name="hinge", kind="revolute", parent="base", child="arm", yaw=0, limit=LIMIT):
    return JOINT.format(name=name, kind=kind, parent=parent, child=child, yaw=yaw, limit=limit)


def inertia_about_the_hinge(model):
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    full = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, full)
    return full[0, 0]


def test_rotated_inertia_of_a_urdf_link_is_kept(tmp_path):
    # diag(1, 2, 2.5) turned by 90 degrees about z: the hinge about x feels 2
    path = urdf(tmp_path, LINK.format(name="arm", yaw=YAW, i=(1, 2, 2.5)), joint())
    assert inertia_about_the_hinge(load_robot(path)) == pytest.approx(2.0)


def test_rotated_fixed_child_is_merged_with_its_rotation(tmp_path):
    # diag(1, 1, 1) and a fixed child diag(1, 2, 2.5) mounted at 90 degrees: 1 + 2
    path = urdf(
        tmp_path,
        LINK.format(name="arm", yaw=0, i=(1, 1, 1)),
        LINK.format(name="tool", yaw=0, i=(1, 2, 2.5)),
        joint(),
        joint(name="mount", kind="fixed", parent="arm", child="tool", yaw=YAW, limit=""),
    )
    assert inertia_about_the_hinge(load_robot(path)) == pytest.approx(3.0)


def test_urdf_limits_are_radians(tmp_path):
    path = urdf(tmp_path, LINK.format(name="arm", yaw=0, i=(1, 1, 1)), joint())
    assert load_robot(path).jnt_range[0].tolist() == [-1.0, 1.0]


def test_everything_wrong_with_a_urdf_is_listed_at_once(tmp_path):
    path = urdf(
        tmp_path,
        '<link name="arm"/><link name="hand"/>',
        LINK.format(name="tip", yaw=0, i=(1, 1, 1)),
        joint(),
        joint(name="wrist", parent="arm", child="hand"),
        joint(name="spin", kind="continuous", parent="hand", child="tip", limit=""),
    )
    with pytest.raises(ModelError) as error:
        load_robot(path, joints=["hinge", "spin", "elbow"])
    message = str(error.value)
    assert "bodies without inertia: arm, hand" in message
    assert "joints without limits: spin" in message
    assert "joints missing: elbow" in message and "joints not expected: wrist" in message
    assert "\n" not in message and str(path) in message


def test_a_wheel_may_turn_without_end_if_one_says_so(tmp_path):
    arm = LINK.format(name="arm", yaw=0, i=(1, 1, 1))
    path = urdf(tmp_path, arm, joint(kind="continuous", limit=""))
    with pytest.raises(ModelError, match="joints without limits: hinge"):
        load_robot(path)
    assert load_robot(path, unlimited=["hinge"]).njnt == 1


def test_everything_wrong_with_an_mjcf_is_listed_at_once(tmp_path):
    path = mjcf(
        tmp_path,
        """<body name="light"><joint name="a" range="-90 90"/></body>
        <body name="heavy"><joint name="b"/><joint range="-1 1"/><geom size=".1"/></body>""",
    )
    with pytest.raises(ModelError) as error:
        load_robot(path)
    assert "bodies without inertia: light" in str(error.value)
    assert "joints without limits: b" in str(error.value)
    assert "1 joints without a name" in str(error.value)


JOINTED = '<joint name="{0}" range="-90 90"/>'


def test_every_moving_body_without_mass_is_named(tmp_path):
    path = mjcf(
        tmp_path,
        f"""<geom size="1"/>
        <body name="empty">{JOINTED.format("a")}
          <body name="also">{JOINTED.format("b")}<geom size=".1" mass="0"/>
            <body name="tip">{JOINTED.format("c")}<geom size=".1"/></body></body></body>
        <body name="flat">{JOINTED.format("d")}<inertial pos="0 0 0" mass="1" diaginertia="0 0 0"/>
        </body>
        <body name="carrier">{JOINTED.format("e")}<body name="load"><geom size=".1"/></body></body>
        <body name="frame"><site name="s"/></body>""",
    )
    with pytest.raises(ModelError, match="bodies without inertia: empty, also, flat$"):
        load_robot(path)


def test_a_moving_body_may_take_its_mass_from_one_welded_to_it(tmp_path):
    body = f"""<body name="carrier">{JOINTED.format("a")}<body name="load"><geom size=".1"/></body>
    </body><body name="frame"><site name="s"/></body><body name="goal" mocap="true"/>"""
    assert load_robot(mjcf(tmp_path, body)).nbody == 5
    inertial = '<inertial pos="0 0 0" mass="1e-6" diaginertia="1e-12 1e-12 1e-12"/>'
    tiny = f'<body name="tiny">{JOINTED.format("a")}{inertial}</body>'
    assert load_robot(mjcf(tmp_path, tiny)).body_mass[1] == 1e-6


def test_a_range_without_limited_is_no_limit_where_the_file_says_so(tmp_path):
    body = """<body><joint name="a" range="-1 1"/><joint name="b" range="-1 1" limited="true"/>
    <geom size=".1"/></body>"""
    path = mjcf(tmp_path, body, '<compiler autolimits="false"/>')
    with pytest.raises(ModelError, match="robot.xml: joints without limits: a$"):
        load_robot(path)


def test_a_urdf_link_of_mass_0_lacks_inertia_and_a_fixed_one_may_lend_it(tmp_path):
    none = LINK.format(name="hand", yaw=0, i=(1, 1, 1)).replace('mass value="1"', 'mass value="0"')
    shape = '<collision><geometry><sphere radius="1"/></geometry></collision>'
    path = urdf(
        tmp_path,
        f'<link name="arm"/><link name="wrist">{shape}</link>',
        none,
        *(LINK.format(name=name, yaw=0, i=(1, 1, 1)) for name in ("tool", "cuff")),
        joint(),
        joint(name="mount", kind="fixed", parent="arm", child="tool", limit=""),
        joint(name="turn", parent="arm", child="wrist"),
        joint(name="belt", kind="fixed", parent="wrist", child="cuff", limit=""),
        joint(name="grip", parent="wrist", child="hand"),
    )
    with pytest.raises(ModelError, match="bodies without inertia: wrist, hand$"):
        load_robot(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("robot.txt", "", "ends with .xml"),
        ("absent.xml", None, "no such file"),
        ("broken.xml", "<mujoco><worldbody>", "XML"),
        ("broken.urdf", "<robot>\n<link/></robo>", "XML"),
        ("odd.xml", "<mujoco><worldbody><nonsense/></worldbody></mujoco>", "nonsense"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path, name, text, said):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError) as error:
        load_robot(path)
    assert "\n" not in str(error.value)
    assert name in str(error.value)
    assert said in str(error.value)


ARM = """<body><joint name="a" range="-1 1"/><geom size=".1"/>
  <body><joint name="b" range="-1 1"/><geom size=".1"/>
  <body><joint name="c" range="-1 1"/><geom size=".1"/></body></body></body>"""
REVERSED = """<actuator><position name="m_c" joint="c" kp="30"/><position name="m_b" joint="b"
  kp="20"/><position name="m_a" joint="a" kp="10"/></actuator>
  <sensor><jointvel name="v_c" joint="c"/><framepos name="p" objtype="body" objname="world"/>
  <jointvel name="v_a" joint="a"/></sensor>"""


def test_arrays_go_by_name_whatever_the_order_of_the_file(tmp_path):
    model = load_robot(mjcf(tmp_path, ARM, REVERSED), joints=["c", "a", "b"])
    gains = [model.actuator_gainprm[i, 0] for i in actuator_ids(model, ["a", "b", "c"])]
    assert gains == [10, 20, 30]
    assert [model.actuator_gainprm[i, 0] for i in actuator_ids(model, ["b", "c", "a"])] == [
        20,
        30,
        10,
    ]
    assert joint_ids(model, ["c", "b", "a"]) == [2, 1, 0]
    assert sensor_columns(model, ["v_a", "v_c", "p"]) == [4, 0, 1, 2, 3]


def test_names_that_do_not_match_are_an_error_not_a_guess(tmp_path):
    model = load_robot(mjcf(tmp_path, ARM, REVERSED))
    with pytest.raises(ModelError, match="joints missing: d; joints not expected: c"):
        joint_ids(model, ["a", "b", "d"])
    with pytest.raises(ModelError, match="driven joints not expected: b"):
        actuator_ids(model, ["a", "c"])
    with pytest.raises(ModelError, match="no sensor v_b; the model has v_c, p, v_a"):
        sensor_columns(model, ["v_b"])
