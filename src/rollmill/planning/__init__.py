"""From a graph to a plan: distribution policies, placement options, plans as files, and a picture of one."""
