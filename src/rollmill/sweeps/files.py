"""Names of the files of a sweep, and of the states of its trials."""

from rollmill.record.run_files import SWEEP

SPECIFICATION, PROPOSALS, STOPPING = SWEEP, "proposals.json", "early_stopping.json"
FAILURES = "failures.json"
TRIALS, TABLE = "trials", "table.csv"
FINISHED, STOPPED_EARLY, FAILED = "finished", "stopped early", "failed"
UNFINISHED, RUNNING = "unfinished", "running"
"""Values of the column `status` for trials without a summary. Other values come from the summary of a run."""
