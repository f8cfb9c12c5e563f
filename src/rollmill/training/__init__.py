"""The life of a training: from a request to a graph, a plan and a run, and to its end or its resumption."""
