"""The model of robots:ShadowHand: a hand of 24 joints, 20 of them with servos, and a block that lies on its palm.

Lengths, masses, gains and ranges follow OpenAI's model of the Shadow Dexterous Hand (Apache-2.0; Plappert et al.,
"Multi-Goal Reinforcement Learning", 2018). Its palm is made of capsules here instead of boxes. Parts of the hand
do not touch each other.
"""

TIME_STEP, SUBSTEPS = 1 / 60, 2

TIPS = ("ff_distal", "mf_distal", "rf_distal", "lf_distal", "th_distal")
"""Bodies at the ends of the fingers."""


_FINGER = """
<body name="{f}_knuckle" pos="{x} 0 {z}" gravcomp="1">
  <inertial pos="0 0 0" mass="0.008" diaginertia="1e-5 1e-5 1e-5"/>
  <joint name="{F}J3" axis="0 1 0" range="-0.349 0.349"/>
  <body name="{f}_proximal" gravcomp="1">
    <inertial pos="0 0 0.023" mass="0.014" diaginertia="1e-5 1e-5 1e-5"/>
    <joint name="{F}J2" axis="1 0 0" range="0 1.571"/>
    <geom class="skin" fromto="0 0 0 0 0 0.045" size="0.01"/>
    <body name="{f}_middle" pos="0 0 0.045" gravcomp="1">
      <inertial pos="0 0 0.012" mass="0.012" diaginertia="1e-5 1e-5 1e-5"/>
      <joint name="{F}J1" axis="1 0 0" range="0 1.571"/>
      <geom class="skin" fromto="0 0 0 0 0 0.025" size="0.00805"/>
      <body name="{f}_distal" pos="0 0 0.025" gravcomp="1">
        <inertial pos="0 0 0.015" mass="0.01" diaginertia="1e-5 1e-5 1e-5"/>
        <joint name="{F}J0" axis="1 0 0" range="0 1.571"/>
        <geom class="skin" fromto="0 0 0 0 0 0.024" size="0.00705"/>
        <site name="{f}_distal"/>
      </body>
    </body>
  </body>
</body>"""

_THUMB = """
<body name="th_base" pos="0.034 -0.009 0.029" axisangle="0 1 0 0.785" gravcomp="1">
  <inertial pos="0 0 0" mass="0.01" diaginertia="1e-5 1e-5 1e-5"/>
  <joint name="THJ4" axis="0 0 -1" range="-1.047 1.047"/>
  <body name="th_proximal" gravcomp="1">
    <inertial pos="0 0 0.017" mass="0.016" diaginertia="1e-5 1e-5 1e-5"/>
    <joint name="THJ3" axis="1 0 0" range="0 1.222"/>
    <geom class="skin" fromto="0 0 0 0 0 0.038" size="0.013"/>
    <body name="th_hub" pos="0 0 0.038" gravcomp="1">
      <inertial pos="0 0 0" mass="0.002" diaginertia="1e-5 1e-5 1e-5"/>
      <joint name="THJ2" axis="1 0 0" range="-0.209 0.209"/>
      <body name="th_middle" gravcomp="1">
        <inertial pos="0 0 0.016" mass="0.016" diaginertia="1e-5 1e-5 1e-5"/>
        <joint name="THJ1" axis="0 1 0" range="-0.524 0.524"/>
        <geom class="skin" fromto="0 0 0 0 0 0.032" size="0.011"/>
        <body name="th_distal" pos="0 0 0.032" gravcomp="1">
          <inertial pos="0 0 0.016" mass="0.016" diaginertia="1e-5 1e-5 1e-5"/>
          <joint name="THJ0" axis="0 1 0" range="-1.571 0"/>
          <geom class="skin" fromto="0 0 0 0 0 0.026" size="0.00918"/>
          <site name="th_distal"/>
        </body>
      </body>
    </body>
  </body>
</body>"""

_LITTLE = """
<body name="lf_metacarpal" pos="-0.017 0 0.044" gravcomp="1">
  <inertial pos="-0.014 0.001 0.014" mass="0.075" diaginertia="1e-5 1e-5 1e-5"/>
  <joint name="LFJ4" axis="0.571 0 0.821" range="0 0.785"/>
  <geom class="skin" fromto="-0.0165 0 -0.004 -0.0165 0 0.024" size="0.0111"/>{finger}
</body>"""

SERVOS = {
    "WRJ1": (5.0, 4.785),
    "WRJ0": (5.0, 2.175),
    **{f"{finger}J3": (1.0, 0.9) for finger in ("FF", "MF", "RF")},
    **{f"{finger}J2": (1.0, 0.9) for finger in ("FF", "MF", "RF")},
    **{f"{finger}J1": (1.0, 0.7245) for finger in ("FF", "MF", "RF")},
    "LFJ4": (1.0, 0.9),
    "LFJ3": (1.0, 0.9),
    "LFJ2": (1.0, 0.9),
    "LFJ1": (1.0, 0.7245),
    "THJ4": (1.0, 2.3722),
    "THJ3": (1.0, 1.45),
    "THJ2": (1.0, 0.99),
    "THJ1": (1.0, 0.99),
    "THJ0": (1.0, 0.81),
}
"""Stiffness of the servo of each joint (N m/rad), and its greatest torque (N m)."""


def model_text() -> str:
    """Returns the MJCF model of the hand and the block. A tendon couples the last two joints of each finger."""
    places = {"ff": (0.033, 0.095), "mf": (0.011, 0.099), "rf": (-0.011, 0.095), "lf": (-0.017, 0.044)}
    fingers = {f: _FINGER.format(f=f, F=f.upper(), x=x, z=z) for f, (x, z) in places.items()}
    palm = "".join(
        f'<geom class="skin" fromto="{x} 0 {low} {x} 0 {high}" size="0.0111"/>'
        for x, low, high in (
            *((x, 0.0001, 0.0759) for x in (-0.0099, 0.004, 0.018, 0.0319)),
            (-0.032, 0.0001, 0.0279),
        )
    )
    tendons = "".join(
        f'<fixed name="{f}_coupling" range="-0.001 0.001"><joint joint="{f}J0" coef="0.00705"/>'
        f'<joint joint="{f}J1" coef="-0.00805"/></fixed>'
        for f in ("FF", "MF", "RF", "LF")
    )
    servos = "".join(
        f'<position joint="{joint}" kp="{gain}" forcerange="{-force} {force}"/>'
        for joint, (gain, force) in SERVOS.items()
    )
    sensors = "".join(f'<force site="{tip}"/><torque site="{tip}"/>' for tip in TIPS)
    return f"""
<mujoco model="hand">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <joint damping="0.1" armature="0.001"/>
    <position inheritrange="1"/>
    <geom friction="1" margin="0.0005"/>
    <default class="skin"><geom type="capsule" contype="1" conaffinity="0"/></default>
  </default>
  <worldbody>
    <body name="forearm" pos="0 -0.266 0.5" euler="1.5707963 0 3.1415927">
      <body name="wrist" gravcomp="1">
        <inertial pos="0.003 0 0.016" mass="0.3" diaginertia="0.001 0.001 0.001"/>
        <joint name="WRJ1" axis="0 1 0" range="-0.489 0.14" damping="0.5" armature="0.005"/>
        <body name="palm" pos="0 0 0.034" gravcomp="1">
          <inertial pos="0.006 0 0.036" mass="0.3" diaginertia="0.001 0.001 0.001"/>
          <joint name="WRJ0" axis="1 0 0" range="-0.698 0.489" damping="0.5" armature="0.005"/>
          {palm}{fingers["ff"]}{fingers["mf"]}{fingers["rf"]}{_LITTLE.format(finger=fingers["lf"])}{_THUMB}
        </body>
      </body>
    </body>
    <body name="block" pos="0 -0.39 0.6">
      <freejoint/>
      <geom type="box" size="0.0325 0.0325 0.0325" density="567" contype="0" conaffinity="1"/>
    </body>
  </worldbody>
  <tendon>{tendons}</tendon>
  <actuator>{servos}</actuator>
  <sensor>{sensors}</sensor>
</mujoco>"""
