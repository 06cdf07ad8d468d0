# Everything runs in .venv, which the first target that needs it creates and later ones reuse.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: setup browser mnist mnist-short test test-portable test-slow lint docs docs-serve package clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, found " + sys.version)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(READY)

# Headless Chromium from npm, in which the tests look at preflight's page; no root needed.
BROWSER := $(VENV)/browser
CHROMIUM := @sparticuz/chromium
browser: $(BROWSER)/chromium

$(BROWSER)/chromium: $(READY)
	npm install --silent --no-save --ignore-scripts --prefix $(BROWSER) $(CHROMIUM)@147.0.0
	cd $(BROWSER) && TMPDIR=$$PWD node --input-type=module \
		--eval "import found from '$(CHROMIUM)'; await found.executablePath()"
	touch $@

# The main job: train MNIST on 8 CPU ranks, save shards, merge them, verify the merged file.
mnist: $(READY)
	$(BIN)/python examples/mnist/train.py --min_accuracy 98.7 $(ARGS)

# The same job in a few minutes' form, for CI.
mnist-short: $(READY)
	$(BIN)/python examples/mnist/train.py --num_epochs 1 --max_steps 100 --compare_steps 20 \
		--min_accuracy 90 --ckpt_dir runs/mnist-short $(ARGS)

# Two workers: a test waits for the ranks it launches most of the time. A file's tests share launches;
# test/conftest.py says which files come first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Where there is no npm, the tests that need the browser are skipped.
test: $(READY) lint
	-$(MAKE) --silent browser
	$(PYTEST) -m "not slow" $(ARGS)

# What needs no torch_xla, in a second environment with the plain install and a newer torch, of which
# pip takes a build for the CPU where it finds one. A plain pytest: nothing here waits for ranks.
PORTABLE := .venv-portable
PORTABLE_TORCH ?= 2.13.*
PORTABLE_READY := $(PORTABLE)/.installed-$(subst *,x,$(PORTABLE_TORCH))

$(PORTABLE_READY): pyproject.toml Makefile
	$(PYTHON) -m venv --clear $(PORTABLE)
	$(PORTABLE)/bin/python -m pip install --quiet -e '.[test]' 'torch==$(PORTABLE_TORCH)' 'transformers>=4.57,<6'
	touch $@

test-portable: $(PORTABLE_READY)
	$(PORTABLE)/bin/python -m pytest -n 2 --dist loadfile -m "not slow" test/checkpoint $(ARGS)

# The same on every number of ranks, more random models, more kills, large models.
test-slow: $(READY)
	$(PYTEST) -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --eval-annotations --target=3.10- xla_fsdp examples tools

# The site, into site/: no link that leads nowhere, no name without a docstring.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Wheel and source archive, into dist/.
package: $(READY)
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) $(PORTABLE) .mypy_cache .ruff_cache .pytest_cache build dist site *.egg-info
