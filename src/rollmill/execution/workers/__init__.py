"""Worker processes on one host: starting them, talking with them, seeing them fail, and ending them.

Nothing here knows what the workers do. What passes between processes is JSON and raw arrays; nothing is
unpickled or evaluated.
"""

from rollmill.execution.workers.control import Control
from rollmill.execution.workers.events import Event, Finished, Hung, Lost, Received, Started
from rollmill.execution.workers.jobs import Job
from rollmill.execution.workers.launchers import Exit, Launcher
from rollmill.execution.workers.messages import Message
from rollmill.execution.workers.supervision import ALL, Supervision

__all__ = [
    "ALL",
    "Control",
    "Event",
    "Exit",
    "Finished",
    "Hung",
    "Job",
    "Launcher",
    "Lost",
    "Message",
    "Received",
    "Started",
    "Supervision",
]
