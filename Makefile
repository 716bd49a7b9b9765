# Two commands: `make demo` and `make test`. Whichever runs first builds .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
ROOMS := reference fast conformance integration
TYPING := build/typing/turboquant_vlm

ifeq ($(shell uname -s),Linux)
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda13 || echo cpu),
endif

.PHONY: demo test lint clean

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/turboquant-vlm demo $(ARGS)

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) $(TYPING)
	$(BIN)/ruff check .
	MYPYPATH=build/typing $(BIN)/mypy -p turboquant_vlm

# The stamp is written last, so an installation that was cut short starts again.
$(STAMP): pyproject.toml
	@echo "Installing into $(VENV) (once, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[$(DEVICE)demo,dev]'
	@touch $@

# mypy reads folders, not the import hook of an editable installation.
$(TYPING): pyproject.toml
	@mkdir -p $@
	@ln -sf ../../../package/__init__.py ../../../package/py.typed $@/
	@for room in $(ROOMS); do ln -sfn ../../../$$room $@/$$room; done
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
