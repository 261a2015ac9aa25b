UV := ./tools/uv.sh
RUN := $(UV) run --frozen --quiet
export UV_PYTHON_DOWNLOADS := never

.PHONY: test-no-cluster test-engines test-kube-foreign test-kube-version quick-types quick-tests up runtime env quick check test unit fuzz docs protos cluster bench-% clean help
help:            ## this list
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

up: runtime      ## serve the models of examples/stack.yaml (no GPU needed); Ctrl-C stops
	@.venv/bin/aimgpu up --file examples/stack.yaml $(ARGS)

runtime:         ## what running needs, from the lock file; what developing needs is left as it is
	@[ -d .venv ] || echo "making the environment from uv.lock (once)" >&2
	@$(UV) sync --frozen --quiet --no-dev --inexact

env:             ## the whole environment from the lock file
	@$(UV) sync --frozen --quiet

quick: env       ## lint, types and the fast tests: under a minute on two cores
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target quick-types quick-tests

quick-types:
	$(RUN) mypy
	$(RUN) lint-imports

quick-tests:
	$(RUN) pytest -q -m "not slow" $(shell python3 tests/tiers.py)

check: env       ## lint, types, layers, generated docs, the C code under gcc and clang
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(RUN) python tools/generate_reference.py --check
	$(RUN) python tools/check_native.py
	$(RUN) python tools/generate_chart.py --check
	$(RUN) python tools/generate_kustomize.py --check
	$(RUN) hadolint deploy/docker/Dockerfile

test: check unit ## all checks and tests

test-no-cluster: check ## all checks, and all tests but those on a Kubernetes cluster
	@$(MAKE) --no-print-directory unit ARGS='-m "not cluster" $(ARGS)'

unit: env
	$(RUN) pytest -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder $(ARGS)

test-engines: env ## the adapters against real programs without a GPU: vLLM for the CPU (6 GB) and Ollama, kept in the cache
	AIMGPU_TEST_ENGINES=1 $(RUN) pytest tests/engines_real -q $(ARGS)

test-kube-foreign: env ## admission and node agent under the real KServe and KAI-Scheduler, built once (10 CPU minutes) and kept in the cache
	$(RUN) pytest tests/kubernetes/test_kserve_cluster.py tests/kubernetes/test_kai_cluster.py -q $(ARGS)

KUBERNETES ?= v1.34.4
test-kube-version: env ## DRA driver and device plugin on another Kubernetes, built once (10 CPU minutes): KUBERNETES=v1.35.4
	AIMGPU_KUBERNETES_VERSION=$(KUBERNETES) $(RUN) pytest tests/cluster/test_cluster.py tests/kubernetes/test_dra_sharing.py \
	    tests/kubernetes/test_dra_failures.py tests/kubernetes/test_device_plugin_cluster.py -q $(ARGS)

fuzz: env        ## the property tests with TIMES (50) times as many examples, and new ones each time
	AIMGPU_FUZZ=$(or $(TIMES),50) $(RUN) pytest -m hypothesis $(ARGS)

docs: env        ## write the generated reference pages and chart files
	$(RUN) python tools/generate_reference.py
	$(RUN) python -m tools.dashboards
	$(RUN) python tools/generate_chart.py
	$(RUN) python tools/generate_kustomize.py

cluster: env     ## a Kubernetes cluster with our parts on simulated GPUs; Ctrl-C removes it (as root)
	@$(RUN) python -m tests.cluster $(ARGS)

protos: env      ## compile the messages of the kubelet's gRPC interfaces
	$(RUN) python -m grpc_tools.protoc --proto_path=src --python_out=src --pyi_out=src src/aimgpu/kubernetes/kubelet_api/*.proto

screenshots: env ## take the pictures of the page that the docs show (needs chromium)
	$(RUN) python -m tools.screenshots $(ARGS)

bench-%: env     ## run one benchmark, write benchmarks/results/NAME.json
	$(RUN) python -m benchmarks.$(subst -,_,$*) $(ARGS)

clean:           ## remove what was built here
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
