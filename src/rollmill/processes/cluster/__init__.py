"""Workers on several hosts: a Ray cluster places, names and ends them, and tells of their death.

All else stays as it is with processes of one host: the supervisor decides who is replaced, heartbeats and messages
go over its own connections, and channels carry the same packages, through TCP. Of what passes between hosts, Ray
carries the jobs alone.
"""

from rollmill.processes.cluster.demands import Demand, demands_of
from rollmill.processes.cluster.joining import Cluster, check_cluster, find_ray, joined, own_host
from rollmill.processes.cluster.launcher import RayHandle, RayLauncher
from rollmill.processes.cluster.modules import modules_to_send
from rollmill.processes.cluster.room import autoscales, check_room, living_nodes

__all__ = [
    "Cluster",
    "Demand",
    "RayHandle",
    "RayLauncher",
    "autoscales",
    "check_cluster",
    "check_room",
    "demands_of",
    "find_ray",
    "joined",
    "living_nodes",
    "modules_to_send",
    "own_host",
]
