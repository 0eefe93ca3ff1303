BIN := .venv/bin
READY := .venv/ready
PEERS := .venv-peers/bin
PEERS_READY := .venv-peers/ready
PACKAGES := .venv-packages/bin
PACKAGES_READY := .venv-packages/ready
CLIENTS := .venv-clients-general/bin
CLIENTS_READY := .venv-clients-general/ready .venv-clients-vision/ready

.PHONY: demo pictures test lint lint-page docs coverage bench harmless packages clients gpu clean

# Kineto's lines about itself are silenced: 6 is above all its levels.
demo: $(READY)
	@rm -rf gpt
	@KINETO_LOG_LEVEL=6 $(BIN)/python -W ignore examples/train_gpt.py
	@$(BIN)/lflops show gpt/lflops/train-1-*.profile.json
	@echo "In the browser, under the tab LFLOPS: $(BIN)/tensorboard --logdir gpt; as one file: $$(ls gpt/lflops/train-1-*.html)"

# Of the documentation, from the demo's last window; needs Chromium.
pictures: demo
	@$(BIN)/python benchmarks/pictures.py

# Hundreds of processes load the package, so compiled files are kept even if the environment turns them off.
test: lint
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

lint: $(READY) lint-page
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m tests.support.density

# The page itself needs no package; its checks need npm.
lint-page:
	@if command -v npm >/dev/null; then \
		$(MAKE) -s node_modules/.ready && npx --no-install tsc -p . && npx --no-install eslint lflops/page tests/page; \
	else \
		echo "Skipped: the types and the linter of the page's code, as there is no npm here."; \
	fi

# Needs no network. A broken link, or a name that the reference does not find, fails it.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean
	@echo "Open site/index.html"

coverage: $(READY)
	@$(BIN)/pytest --cov lflops --cov-branch --cov-report term:skip-covered

bench: $(READY) $(PEERS_READY)
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/profile_file.py
	@$(BIN)/python benchmarks/calibrate.py
	@$(BIN)/python benchmarks/attribution.py
	@$(BIN)/python benchmarks/traces.py
	@$(BIN)/python benchmarks/trace_reader.py
	@$(BIN)/python benchmarks/diff.py
	@$(BIN)/python benchmarks/gather.py
	@$(BIN)/python benchmarks/ranks.py
	@$(BIN)/python benchmarks/roofline.py
	@$(BIN)/python benchmarks/estimate.py
	@$(BIN)/python benchmarks/memory.py
	@$(BIN)/python benchmarks/checkpointing.py
	@$(BIN)/python benchmarks/page.py
	@$(PEERS)/python benchmarks/accuracy.py
	@$(PEERS)/python benchmarks/latency.py
	@$(BIN)/python benchmarks/drivers.py
	@$(BIN)/python benchmarks/unprofiled_step.py
	@$(PEERS)/python benchmarks/callback.py

# Several hundred trainings, each with and without the monitor: a quarter of an hour on two cores.
harmless: $(READY)
	@$(BIN)/python benchmarks/harmless.py

# Other packages' kernels, really installed, where a CPU runs them.
packages: $(PACKAGES_READY)
	@$(PACKAGES)/pytest -n0 tests/flop_counter/test_real_packages.py

# Training runs of other packages, plain, watched and with planted faults: an hour and a half on two
# cores. Finished runs are kept in runs/clients. `make clients ONLY=trl_dpo` runs some of them.
clients: $(CLIENTS_READY)
	@PYTHONPATH=$(CURDIR) $(CLIENTS)/python -m benchmarks.clients $(if $(ONLY),--only $(ONLY))

# All that only a GPU can tell, within ten minutes. Where torch is already installed, as on a lent machine: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	@PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/gpu.py

clean:
	@rm -rf .venv .venv-peers .venv-packages .venv-clients-* .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage node_modules dist site runs gpt gpt.profile.json
	@find lflops tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

node_modules/.ready: package.json package-lock.json
	@npm ci --silent --no-audit --no-fund
	@touch $@

# `make test TORCH=torch==2.8.0` sets up with another torch, and with the newest of all else.
# The build tools come first, without isolation: constraints do not reach into an isolated build, so its versions would not be pinned.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (minutes the first time: torch is large)"
	@python3 -m venv .venv
ifdef TORCH
	@$(BIN)/pip install -qq hatchling editables
	@$(BIN)/pip install -qq --no-build-isolation '$(TORCH)' -e '.[dev]'
else
	@$(BIN)/pip install -qq -c constraints.txt hatchling editables
	@$(BIN)/pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
endif
	@touch $@

# DeepSpeed's build imports torch, and none of its kernels are needed.
$(PEERS_READY): pyproject.toml constraints.txt benchmarks/peers.txt
	@echo "Setting up .venv-peers"
	@python3 -m venv .venv-peers
	@$(PEERS)/pip install -qq -c constraints.txt -c benchmarks/peers.txt torch hatchling editables setuptools wheel
	@DS_BUILD_OPS=0 $(PEERS)/pip install -qq -c constraints.txt --no-build-isolation -r benchmarks/peers.txt -e .
	@touch $@

$(PACKAGES_READY): pyproject.toml constraints.txt tests/packages.txt
	@echo "Setting up .venv-packages"
	@python3 -m venv .venv-packages
	@$(PACKAGES)/pip install -qq -c constraints.txt hatchling editables
	@$(PACKAGES)/pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(PACKAGES)/pip install -qq --no-deps -r tests/packages.txt
	@touch $@

# The pins are complete, so pip has nothing to resolve. lflops itself needs only what they have.
.venv-clients-%/ready: benchmarks/clients/requirements-%.txt pyproject.toml
	@echo "Setting up .venv-clients-$* (gigabytes: torch is large)"
	@python3 -m venv .venv-clients-$*
	@.venv-clients-$*/bin/pip install -qq -r $<
	@.venv-clients-$*/bin/pip install -qq --no-build-isolation --no-deps -e .
	@touch $@
