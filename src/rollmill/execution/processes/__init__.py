"""Worker processes on one host: starting them, talking with them, seeing them fail, and ending them.

Nothing here knows what the workers do. What passes between processes is JSON and raw arrays; nothing is
unpickled or evaluated.
"""

from rollmill.execution.processes.clocks import Clock
from rollmill.execution.processes.control import Control
from rollmill.execution.processes.events import Audible, Event, Finished, Hung, Lost, Received, Silent, Started
from rollmill.execution.processes.jobs import Job
from rollmill.execution.processes.launchers import Exit, Launcher
from rollmill.execution.processes.local_launcher import LocalLauncher
from rollmill.execution.processes.messages import WorkerMessage
from rollmill.execution.processes.supervision import ALL, Supervision
from rollmill.execution.processes.supervisor import Supervisor
from rollmill.execution.processes.threads import LocalControl, ThreadSupervisor, WorkerFailed
from rollmill.execution.processes.worker import serve

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
