"""Worker processes on one host: starting them, talking with them, seeing them fail, and ending them.

Nothing here knows what the workers do. What passes between processes is JSON and raw arrays; nothing is
unpickled or evaluated.
"""

from rollmill.execution.workers.control import Control
from rollmill.execution.workers.events import Event, Finished, Hung, Lost, Received, Started
from rollmill.execution.workers.jobs import Job
from rollmill.execution.workers.launchers import Exit, Launcher
from rollmill.execution.workers.local_launcher import LocalLauncher
from rollmill.execution.workers.messages import Message
from rollmill.execution.workers.supervision import ALL, Supervision
from rollmill.execution.workers.supervisor import Supervisor
from rollmill.execution.workers.threads import LocalControl, ThreadSupervisor, WorkerFailed
from rollmill.execution.workers.worker import serve

__all__ = [
    "ALL",
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
    "Message",
    "Received",
    "Started",
    "Supervision",
    "Supervisor",
    "ThreadSupervisor",
    "WorkerFailed",
    "serve",
]
