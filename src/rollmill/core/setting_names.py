"""Suggests settings for unknown names, including names that other libraries use."""

from collections.abc import Iterable

from rollmill.core.errors import UsageError, unknown_name

ALIASES = {
    "lr": "learning_rate",
    "step_size": "learning_rate",
    "discount": "gamma",
    "discount_factor": "gamma",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "lambda_": "gae_lambda",
    "n_steps": "num_steps",
    "rollout_length": "num_steps",
    "unroll_length": "num_steps",
    "n_envs": "num_envs",
    "n_minibatches": "num_minibatches",
    "nminibatches": "num_minibatches",
    "epochs": "update_epochs",
    "n_epochs": "update_epochs",
    "num_epochs": "update_epochs",
    "timesteps": "total_timesteps",
    "steps": "total_timesteps",
    "total_steps": "total_timesteps",
    "clip_range": "clip_coef",
    "clip_eps": "clip_coef",
    "clip_epsilon": "clip_coef",
    "entropy_coef": "ent_coef",
    "entropy_coeff": "ent_coef",
    "value_coef": "vf_coef",
    "grad_clip": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "norm_obs": "normalize_observations",
    "normalize_obs": "normalize_observations",
    "norm_reward": "normalize_rewards",
    "layers": "hidden_sizes",
    "log_dir": "run_dir",
    "output_dir": "run_dir",
    "out": "run_dir",
    "or_resume": "resume_if_exists",
    "auto_resume": "resume_if_exists",
    "requeue": "resume_if_exists",
    "gpus": "devices",
    "num_gpus": "devices",
    "num_devices": "devices",
    "num_workers": "workers",
    "num_actors": "actors",
}
"""Names of settings in other libraries, with their names in Rollmill."""

_MINIBATCHES = "the number of minibatches into which num_envs * num_steps samples are divided, not their size."
NOTES = {
    "verbose": ("quiet", "does the opposite: progress is printed unless it is set."),
    "batch_size": ("num_minibatches", f"is {_MINIBATCHES}"),
    "minibatch_size": ("num_minibatches", f"is {_MINIBATCHES}"),
}
"""Names of settings in other libraries, with a setting of the same purpose that takes other values."""

ELSEWHERE = {
    **dict.fromkeys(
        ("env", "env_id", "env_name", "environment", "gym_id"),
        "The environment follows the algorithm, as in `rollmill train ppo CartPole-v1`.",
    ),
    **dict.fromkeys(("algo", "algorithm"), "The algorithm comes first, as in `rollmill train ppo CartPole-v1`."),
    **dict.fromkeys(
        ("cuda", "device"),
        "JAX uses a GPU if there is one. To use only the CPU, set the environment variable JAX_PLATFORMS=cpu.",
    ),
    **dict.fromkeys(
        ("save_model", "save_freq", "checkpoint_frequency"),
        "Checkpoints are always saved. --checkpoint-iterations and --keep-last set how many.",
    ),
    "capture_video": "`rollmill render RUN` shows the policy of a run.",
    "exp_name": "--run-dir names the directory of the run.",
    "torch_deterministic": "The same seed always gives the same weights on the same machine.",
}
"""Options of other libraries without an equivalent option, with a sentence on what to do instead."""


def named_like(name: str, known: Iterable[str]) -> str | None:
    """Returns the setting in `known` that other libraries call `name`, or None. Dashes count as underscores."""
    meant = ALIASES.get(_plain(name))
    return next((option for option in known if option.replace("-", "_") == meant), None)


def note_on(name: str, known: Iterable[str]) -> str | None:
    """Returns a sentence about a setting that serves the purpose of `name` but takes other values, or None.

    The sentence begins with the name of the setting as in `known`.
    """
    setting, note = NOTES.get(_plain(name), ("", ""))
    meant = next((option for option in known if option.replace("-", "_") == setting), None)
    return None if meant is None else f"{meant} {note}"


def unknown_setting(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> UsageError:
    """Returns the error for an unknown setting. It suggests the nearest settings, or our name for `name`."""
    known = list(known)
    if (note := note_on(name, known)) is not None:
        return UsageError(f"unknown {kind} {name!r}. {note}")
    return unknown_name(kind, name, known, hint=hint, meant=named_like(name, known))


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()
