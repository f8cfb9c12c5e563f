"""What the user is told about links to other hosts."""

from rollmill.channels.transport.tcp_options import SECONDS_UNTIL_LOST
from rollmill.processes.events import Audible, Silent
from rollmill.workers.reports import Notice


def link_notice(event: Silent | Audible) -> Notice:
    """The line about a host that has become silent, or is heard again."""
    match event:
        case Silent(job, seconds, host):
            return Notice(
                f"nothing is heard from {job.name} on {host} for {seconds:.0f} s; it is given up after "
                f"{SECONDS_UNTIL_LOST} s"
            )
        case Audible(job, seconds, host):
            return Notice(f"{job.name} on {host} is heard again after {seconds:.0f} s")
