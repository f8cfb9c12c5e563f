# `make demo` and `make test` need python3, make and git alone; they make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
REJAX := .rejax
SB3 := .sb3

.PHONY: demo test test-slow lint format docs package benchmark-training benchmark-learning benchmark-tag benchmark-tag-learning benchmark-images benchmark-offered clean

demo: $(VENV)/.installed
	$(BIN)/rollmill train ppo CartPole-v1 --recipe cartpole-two-cores --run-dir $(DEMO_RUN)
	$(BIN)/rollmill evaluate $(DEMO_RUN) --episodes 100
	@echo "run directory: $(DEMO_RUN)"
	@echo "evaluate it again: $(BIN)/rollmill evaluate $(DEMO_RUN)"

# Tests of whole trainings, of searches, of the compiler and of long plays run without runtime checks of types and
# shapes, which would double their time.
UNCHECKED := $(addprefix tests/,cli fusion gpus hostile manual offered plan_search plotting policies processes programs \
	runs serving sweeps training tree_search workers) tests/core/test_extending.py tests/hooks/test_tracking.py \
	$(addprefix tests/dataflow/test_,flow.py replay.py loops.py sequences.py) tests/core/test_algorithm_pages.py \
	$(addprefix tests/envs/test_,adapters.py batch_simulators.py check.py named_transforms.py pgx.py robots.py tag.py \
	tag_parity.py) \
	$(addprefix tests/algorithms/test_,a3c.py adaptive_rate.py alphazero.py classical.py final_masks.py hyperparameters.py \
	images.py impala.py long_counts.py mappo_fragments.py mappo_probes.py memory.py numbers_of_roles.py off_policy.py \
	own_files.py parameters_of_environments.py ppo_fragments.py novelty.py pqn.py probes.py r2d2.py recurrent_agents.py \
	rsac.py schedule_progress.py schedules_of_numbers.py team_values.py value_distributions.py)

test: $(VENV)/.installed-peers
	ROLLMILL_REQUIRE_PEERS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(UNCHECKED:%=--ignore=%)
	ROLLMILL_REQUIRE_PEERS=1 ROLLMILL_TYPE_CHECKS=0 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" \
		$(UNCHECKED)

test-slow: $(VENV)/.installed-peers
	ROLLMILL_REQUIRE_PEERS=1 ROLLMILL_TYPE_CHECKS=0 XLA_FLAGS=--xla_force_host_platform_device_count=2 \
		$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-dev
	$(BIN)/python scripts/manual_pages.py
	$(BIN)/zensical build --strict

# A wheel and an archive of the source, in dist/.
package: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# Rejax needs older packages than Rollmill: it gets an environment of its own.
$(REJAX)/.installed:
	$(PYTHON) -m venv $(REJAX)
	$(REJAX)/bin/pip install --quiet rejax==0.1.3 gymnax==0.0.9
	touch $@

# Stable-Baselines3 needs torch: it gets an environment of its own, with torch for CPUs.
$(SB3)/.installed:
	$(PYTHON) -m venv $(SB3)
	$(SB3)/bin/pip install --quiet torch --extra-index-url https://download.pytorch.org/whl/cpu
	$(SB3)/bin/pip install --quiet stable-baselines3==2.7.0
	touch $@

benchmark-training: $(VENV)/.installed $(REJAX)/.installed
	$(BIN)/python benchmarks/training.py cpu --rejax $(REJAX)/bin/python

benchmark-learning: $(VENV)/.installed $(REJAX)/.installed
	$(BIN)/pip install --quiet matplotlib
	$(BIN)/python benchmarks/learning.py --rejax $(REJAX)/bin/python
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/figures.py learning

benchmark-offered: $(VENV)/.installed $(SB3)/.installed
	$(SB3)/bin/pip install --quiet --editable .
	$(BIN)/python benchmarks/offered.py --sb3 $(SB3)/bin/python

benchmark-images: $(VENV)/.installed $(SB3)/.installed
	$(BIN)/python benchmarks/images.py --sb3 $(SB3)/bin/python

benchmark-tag: $(VENV)/.installed-peers
	$(BIN)/python benchmarks/tag.py cpu

benchmark-tag-learning: $(VENV)/.installed
	$(BIN)/pip install --quiet matplotlib
	$(BIN)/python benchmarks/tag_learning.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/figures.py tag_learning

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

# WarpDrive's NumPy environments run without what the package depends on: pycuda, torch, an old gym.
$(VENV)/.installed-peers: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps rl-warp-drive==2.7.1
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(REJAX) $(SB3) .pytest_cache .ruff_cache
