"""Worker processes on one host: starting them, talking with them, seeing them fail, and ending them.

Nothing here knows what the workers do. What passes between processes is JSON and raw arrays; nothing is
unpickled or evaluated.
"""

from rollmill.processes.clocks import Clock
from rollmill.processes.control import Control
from rollmill.processes.events import Audible, Event, Finished, Hung, Lost, Received, Silent, Started
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Exit, Launcher
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.messages import WorkerMessage
from rollmill.processes.supervision import ALL, Supervision
from rollmill.processes.supervisor import Supervisor
from rollmill.processes.threads import LocalControl, ThreadSupervisor, WorkerFailed
from rollmill.processes.worker import serve

__all__ = [
    "ALL",
    "Audible",
    "Clock",
    "Control",
    "Event",
    "Exit",
    "Finished",
    "Hung",
    "Job",
    "Launcher",
    "LocalControl",
    "LocalLauncher",
    "Lost",
    "WorkerMessage",
    "Received",
    "Silent",
    "Started",
    "Supervision",
    "Supervisor",
    "ThreadSupervisor",
    "WorkerFailed",
    "serve",
]
