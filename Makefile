# make setup: the environment alone.
# make demo: set up and run the main job, which leaves demo.html.
# make demo-tasks: the same for three tasks that are no matrix products.
# make test: set up and run the quick tests and a sample of every corpus.  make test-all: every test. ARGS goes to
# pytest.  make check: style and types.
# make wheel: a wheel with the compiled kernels.
# make report: docs/report.html, the page of the H200's results and of an H100's models and searchers, and the README's
# pictures of them.
# make test-gpu: the tests that need an NVIDIA GPU.  make tables: the H200's tables over 1,000 shapes, resumable.
# TORCH_INDEX: an index to take torch from, for its CPU builds; the usual one if not given.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# packages for the GPU where there is one
GPU_EXTRA := $(if $(wildcard /dev/nvidiactl),[cuda])
# for the demo's page and for `cuda-l2 watch`: the extra report without pyarrow's 170 MB
PAGES := jinja2 matplotlib starlette uvicorn
# an index with torch's CPU builds; the usual one may have torch for Linux with gigabytes of CUDA alone
TORCH_INDEX ?=

.PHONY: setup demo demo-tasks test test-all test-gpu check format bench tables tables-fp32 tables-fp16 report wheel clean

setup: $(VENV)/.run

demo: $(VENV)/.run
	$(BIN)/cuda-l2 optimize 512x512x512 --budget 60s --page demo.html

DEMO_TASKS := softmax:rows=128,columns=2048 layer_norm:rows=128,columns=2048 gelu:rows=128,columns=2048
demo-tasks: $(VENV)/.run
	$(BIN)/cuda-l2 optimize $(DEMO_TASKS) --budget 6s --target cpu

# With bytecode kept also where the shell says not to: else every worker and every command compiles all it imports.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.dev
	$(PYTEST) --all $(ARGS)

# The tests that need an NVIDIA GPU; their result is kept under results/ with the machine's description.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu --gpu-record results/h200/test-gpu.json

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.run
	$(BIN)/cuda-l2 bench --out bench-cpu

REPORTED := results/h200 results/h100/models results/h100/layers/layers.csv results/h100/world
report: $(VENV)/.dev
	$(BIN)/cuda-l2 report $(REPORTED) -o docs/report.html --pictures docs/pictures --force

# dist/*.whl with the kernels compiled for Hopper GPUs and the operator: needs NVRTC (the extra cuda), g++ and no GPU.
wheel: $(VENV)/.dev
	$(BIN)/cuda-l2 library build --carried
	$(PIP) wheel . --no-deps --no-build-isolation --wheel-dir dist

# An interrupted run goes on from the results.jsonl that its folder holds. On N GPUS each measures a part of the shapes.
# With make -j2 both tables' shapes take turns on each GPU, so that neither's start leaves it idle.
# CHOICES: the algorithms that cuBLASLt's tuning chose, of one kind of GPU, driver and library; another file for others.
GPUS ?= 1
CHOICES ?= results/h200/cublaslt.jsonl.gz
TABLES = $(BIN)/cuda-l2 bench --grid paper --library results/h200/schedules.csv --choices $(CHOICES) \
  $(if $(filter-out 1,$(GPUS)),--workers $(GPUS))
tables: tables-fp32 tables-fp16
tables-fp32: $(VENV)/.run
	$(TABLES) --protocols offline,rotating,server --out results/h200/grid-fp32
tables-fp16: $(VENV)/.run
	$(TABLES) --accumulate fp16 --arms cuBLASLt-AutoTuning --out results/h200/grid-fp16

clean:
	rm -rf $(VENV) dist cuda_l2/library/deploy/pack cuda_l2/library/deploy/op-*.so cuda_l2/library/call-*.so .build-cache .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON to one"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "venv is missing: apt install python3-venv"; exit 2; }
	@command -v $${CC:-cc} >/dev/null || { echo "no C compiler: apt install gcc libc6-dev, or set CC"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Setting up $(VENV): about 1 GB, several where torch comes with CUDA (TORCH_INDEX: an index of CPU builds) ..."
	@$(PIP) install --constraint constraints.txt \
	  $(if $(TORCH_INDEX),--no-deps --retries 2 --timeout 20 --index-url $(TORCH_INDEX)) torch \
	  || { echo "torch was not installed; TORCH_INDEX names another index"; exit 2; }
	@$(PIP) install --quiet --constraint constraints.txt --editable '.$(GPU_EXTRA)' torch $(PAGES)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,cuda]'
	@touch $@
