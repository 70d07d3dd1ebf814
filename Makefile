# rollout: `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

MODULES := proto database libs services cmd
TOOLS := $(CURDIR)/.tools/bin
STAMPS := $(CURDIR)/.tools/stamps
PYTHON := $(CURDIR)/.venv/bin/python
GENERATED := proto/gen libs/engine/capabilities.json python/rollout/names.py schemas/run_config.schema.json docs/reference docs/migrating.md docs/engines.md ':(glob)python/**/*_pb2*'
VERSION = $(shell git describe --tags --match 'v[0-9]*' --always --dirty 2>/dev/null || echo unknown)
MODEL ?= tiny
KILLS ?= 10
CREATIONS ?= 40
SEED ?= 1
SHAPE ?= embedded
TORCH ?= 0
ASYNC ?= 0
AGENTS ?= 0
MULTISTEP ?= 0
# Spinning OpenMP threads of two torch processes starve each other.
export OMP_WAIT_POLICY := PASSIVE

include scripts/tools.mk

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ---- build ------------------------------------------------------------------------------------

.PHONY: build
build: venv ## Build bin/rollout, bin/rolloutd, bin/rollout-sandbox and bin/rollout-worker
	@mkdir -p bin
	@cd cmd && go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o ../bin/ ./rollout ./rolloutd
	@cd cmd && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o ../bin/ ./rollout-sandbox
	@ln -sfn ../.venv/bin/rollout-worker bin/rollout-worker

.PHONY: engine-sglang
engine-sglang: ## Install SGLang and the workers into .tools/sglang, a separate environment (6.5 GB)
	@scripts/venv_engine sglang

.PHONY: venv venv-dev venv-bench
venv:
	@scripts/venv requirements.lock
venv-dev:
	@scripts/venv requirements-dev.lock
venv-bench:
	@scripts/venv requirements-bench.lock

.PHONY: engine-vllm
engine-vllm: ## Install vLLM and the workers into .tools/vllm (6 GB), for `engine.python`
	@scripts/venv_engine vllm

# ---- run --------------------------------------------------------------------------------------

.PHONY: demo
demo: build ## Train a model with every service and worker (MODEL=smollm2 for a real pretrained one)
	@scripts/demo $(MODEL)

.PHONY: bench
bench: build venv-bench ## Measure throughput as ratios against TRL and plain generate
	@scripts/bench

.PHONY: bench-engine
bench-engine: build venv-bench ## Measure the embedded engine against `model.generate` and vLLM on this machine's CPUs
	@scripts/venv_engine vllm
	@PYTHONPATH=python $(PYTHON) bench/engine.py --vllm .tools/vllm/bin/python --check $(ARGS)

.PHONY: bench-train
bench-train: build venv-bench ## Measure training against TRL: SFT, DPO, reward model on data, GRPO with long prompts
	@$(PYTHON) bench/train.py
	@$(PYTHON) bench/grpo_long.py

.PHONY: bench-takeover
bench-takeover: build venv-dev $(SERVERS) ## Measure takeover of scheduler, buffer and controller, and redispatch, medians of 10 kills
	@scripts/postgres && PYTHONPATH=python:e2e:e2e/support $(PYTHON) bench/takeover.py --check $(ARGS)

.PHONY: bench-stealing
bench-stealing: build venv-dev ## Measure pulled work against a static split, two of 16 workers at half speed
	@PYTHONPATH=python $(PYTHON) bench/stealing.py --check $(ARGS)

RUNS ?= 300
SAMPLES ?= 1000000
.PHONY: bench-soak
bench-soak: build venv-dev ## Make 300 runs on one rolloutd, and check that memory, files, tables, and the cost of a step stay flat (40 minutes; RUNS=300 SAMPLES=1000000; continues if it was killed)
	@PYTHONPATH=python:e2e:e2e/support $(PYTHON) bench/soak.py --runs $(RUNS) --samples $(SAMPLES) $(ARGS)

.PHONY: bench-scale
bench-scale: build venv-dev ## Measure one control plane with 10, 100 and 1,000 simulated workers
	@PYTHONPATH=python:e2e:e2e/support $(PYTHON) bench/scale.py --check $(ARGS)

.PHONY: bench-recovery
bench-recovery: ## Measure what a resume and an audit ask of a ledger with 300,000 steps and 3,000,000 groups in SQLite (10 minutes)
	@cd services && go test -tags recovery -run 'TestRecoveryCost|TestAuditCost' -v -timeout 60m ./buffer

.PHONY: bench-buffer
bench-buffer: build venv-dev ## Measure the path from worker to learner next to TransferQueue, Ray, and ZeroMQ
	@scripts/venv_buffer
	@$(PYTHON) bench/buffer.py $(ARGS)

.PHONY: bench-gateway
bench-gateway: build venv-dev ## Measure what the gateway adds to a call of a worker, next to SMG and LiteLLM
	@scripts/venv_gateways
	@PYTHONPATH=python:e2e:e2e/support $(PYTHON) bench/gateway.py --check $(ARGS)

.PHONY: bench-sandbox
bench-sandbox: build venv-dev ## Measure how long boxes take to start, and run 200 at once
	@PYTHONPATH=python $(PYTHON) bench/sandbox.py --check $(ARGS)

.PHONY: bench-plugins
bench-plugins: build venv-dev ## Measure a reward in process, in a child process, and in sidecars in Python and Go
	@PYTHONPATH=python $(PYTHON) bench/plugins.py $(ARGS)

.PHONY: bench-episodes
bench-episodes: build venv-dev ## Measure how busy 1,000 concurrent episodes of 20 turns keep the slots of simulated engines
	@PYTHONPATH=python:e2e:e2e/support $(PYTHON) bench/episodes.py --check $(ARGS)

.PHONY: bench-eval
bench-eval: build venv-dev ## Measure step times of a run with evaluations on a reserved worker against those of one without
	@PYTHONPATH=python:e2e:e2e/support $(PYTHON) bench/evaluation.py --check $(ARGS)

.PHONY: bench-control
bench-control: build venv-dev ## Measure environment steps per second through environment workers next to gymnasium's AsyncVectorEnv
	@scripts/venv_control
	@PYTHONPATH=python:.tools/control $(PYTHON) bench/control.py --check $(ARGS)

.PHONY: bench-weights
bench-weights: build venv-bench ## Measure patches of weights against XOR + zstd, and their delivery against a plain copy
	@$(PYTHON) bench/weights.py $(ARGS)

# ---- check ------------------------------------------------------------------------------------

.PHONY: test
test: build venv-dev ## Run every Go and Python test (no root, no server, no GPU)
	@scripts/test

.PHONY: lint
lint: $(GOLANGCI_LINT) $(BUF) $(RULES) venv-dev ## Check format, style, types, the direction of dependencies and the contracts
	@scripts/lint

.PHONY: fmt
fmt: $(BUF) $(RULES) venv-dev ## Format Go, Python and proto
	@gofmt -w $(MODULES) && .venv/bin/ruff format python scripts bench examples e2e && $(TOOLS)/buf format -w proto

.PHONY: validate-schema
validate-schema: venv-dev ## Check that every example config fits the JSON Schema
	@$(PYTHON) scripts/validate_schema.py
	@find examples e2e bench -name "*.toml" -not -path "examples/plugins/*/*" -not -name suites.toml -print0 | RUST_LOG=error xargs -0 .venv/bin/taplo check --schema file://$(CURDIR)/schemas/run_config.schema.json

.PHONY: breaking
breaking: $(BUF) $(RULES) ## Check that the contracts are compatible with the previous ones
	@scripts/breaking

.PHONY: drift
drift: generate docs ## Check that generated files are committed
	@changed=$$(git status --porcelain -- $(GENERATED)); [ -z "$$changed" ] || { git --no-pager diff -- $(GENERATED); echo "generated files differ from the committed ones (make generate docs, then commit):"; echo "$$changed"; exit 1; }

.PHONY: check
check: ## Run everything that CI runs
	@.ci/run

.PHONY: check-full
check-full: check check-slow check-race check-device check-process check-engines check-environments check-playground learn-check bench ## CI, the slow end-to-end scenarios, every family of algorithms, the race detector over all Go tests, the whole suites on the fake device, saved processes, vLLM, SGLang, the playground, and the benches

.PHONY: check-race
check-race: build venv-dev ## Run the Go tests under the race detector (needs a C compiler)
	@scripts/test --race

.PHONY: check-slow
check-slow: build venv-dev $(SERVERS) ## Run the end-to-end scenarios that check-e2e and check-servers leave out because they are slow, and kill CREATIONS=40 creations of snapshots
	@scripts/postgres && scripts/e2e e2e -m slow
	@KILLS=$(CREATIONS) scripts/e2e e2e/test_killed_snapshots.py -s

.PHONY: check-device
check-device: venv-dev ## Run the whole suites of engine and learner on the fake device that stands in for a GPU
	@cd python && FAR_DEVICE=all ../.venv/bin/python -m pytest tests/far

.PHONY: check-process
check-process: build venv-dev ## Save and restore processes with CRIU, which is built into .tools once; needs Linux and root, otherwise it is skipped
	@scripts/check_process

FAILOVERS ?= 50
.PHONY: check-failover
check-failover: ## Kill the primary of PostgreSQL under load and promote its synchronous standby (FAILOVERS=50)
	@scripts/postgres
	@cd libs && ROLLOUT_TEST_SERVERS=1 go test -run TestPostgresFailover -v -timeout 60m ./sqldb -failovers $(FAILOVERS)
	@$(MAKE) chaos KILLS=$(FAILOVERS) SHAPE=servers FAULTS=failover

.PHONY: check-playground
check-playground: ## Use the page of the gateway in headless Chromium (needs chromium on PATH)
	@cd services && go test -tags browser -run Playground ./gateway

.PHONY: check-engines check-vllm check-sglang
check-engines: build venv-dev ## Run the suite of engines on transformers, vLLM, and SGLang, each in its environment (13 GB)
	@scripts/check_engines
check-vllm: build venv-dev ## Run the suite of engines on vLLM alone (6 GB)
	@scripts/check_engines vllm
check-sglang: build venv-dev ## Run the suite of engines and the tests of SGLangWorker on SGLang alone (6.5 GB)
	@scripts/check_engines sglang

ENGINE ?= transformers
CLIENTS ?=
.PHONY: check-environments
check-environments: build venv-dev ## Play and train in the environments of gymnasium, mcp, reasoning-gym and verifiers, and evaluate with inspect-ai and lm-eval, with their real packages; check the bits of many turns
	@scripts/e2e e2e/test_environments.py e2e/test_verifiers.py e2e/test_suites.py e2e/test_many_turns_torch.py

.PHONY: check-clients
check-clients: build venv-dev ## Run unmodified clients in Python, Node and Go, fixed weights, then changing ones (ENGINE=transformers|vllm|sglang CLIENTS=openai,go)
	@scripts/check_clients $(ENGINE) --clients '$(CLIENTS)' $(ARGS)

SESSIONS ?= 10000
.PHONY: soak-sessions
soak-sessions: build venv-dev ## Play sessions while workers are killed and weights change, and compare ledgers and trajectories (SESSIONS=10000 SEED=s)
	@scripts/soak_sessions --sessions $(SESSIONS) $(if $(filter command environment,$(firstword $(origin SEED))),--seed $(SEED)) $(ARGS)

.PHONY: check-schemathesis
check-schemathesis: build venv-dev ## Send generated requests to every endpoint of /openapi.json: no server error
	@scripts/check_clients transformers --schemathesis 300

.PHONY: check-packages
check-packages: build venv-dev $(RULES) ## Build the Python and Go packages, install each alone, and use it, and run the example in Node
	@scripts/e2e e2e/packages

.PHONY: check-platforms
check-platforms: venv-dev ## Check that each Go module builds alone, and everything builds or installs on macOS
	@scripts/platforms

.PHONY: check-oracles
check-oracles: venv-dev ## Ask TRL, verl, and RLinf again, in a separate environment, and compare with their recorded answers
	@scripts/oracles --check
	@cd python && $(PYTHON) -m pytest tests/algorithms/test_oracles.py tests/algorithms/test_document.py tests/multistep/test_oracle.py

FAMILIES ?=
SEEDS ?= 0,1,2
.PHONY: learn-check
learn-check: build ## Train every family of algorithms past its threshold (FAMILIES=dpo,ppo SEEDS=0 MODEL=smollm2 RESUME=1)
	@$(PYTHON) bench/learn.py --model $(if $(filter smollm2,$(MODEL)),smollm2,addition) --families '$(FAMILIES)' --seeds $(SEEDS) $(if $(RESUME),--resume)

.PHONY: learn-agent-openai
learn-agent-openai: build venv-dev ## Train on the games of an agent with the OpenAI client, and on shuffled rewards: only the first may improve
	@PATH="$(CURDIR)/bin:$$PATH" $(PYTHON) examples/agent_openai/compare.py --seeds $(SEEDS)

ENVIRONMENTS ?=
.PHONY: learn-agents
learn-agents: build venv-dev ## Train in environments with their rewards, and with shuffled ones: only the first may improve (ENVIRONMENTS=guess,gymnasium SEEDS=0 RESUME=1)
	@$(PYTHON) bench/learn_agents.py --environments '$(ENVIRONMENTS)' --seeds $(SEEDS) $(if $(RESUME),--resume)

TASKS ?= cartpole-1,cartpole-4,pendulum
.PHONY: learn-control
learn-control: build ## Train policies that act for many steps past their bars, on CartPole and Pendulum (TASKS=pendulum SEEDS=0)
	@$(PYTHON) bench/learn_control.py --tasks '$(TASKS)' --seeds $(SEEDS)

.PHONY: check-compose
check-compose: venv-dev ## Check that docker-compose.yml parses and publishes only the allowed ports
	@$(PYTHON) scripts/check_compose.py

.PHONY: servers
servers: $(SERVERS) ## Build the real servers that check-servers starts (Consul, NATS, S3, GCS) into .tools, once

.PHONY: chaos
chaos: build venv-dev $(if $(filter servers,$(SHAPE)),$(SERVERS)) ## Inject random faults into a running job (KILLS=n SEED=s SHAPE=embedded|servers TORCH=0|1 ASYNC=0|1 AGENTS=0|1 MULTISTEP=0|1 FAULTS="disk failover")
	@scripts/chaos --kills $(KILLS) --seed $(SEED) --shape $(SHAPE) --torch $(TORCH) --asynchronous $(ASYNC) --agents $(AGENTS) --multistep $(MULTISTEP) $(if $(FAULTS),--faults $(FAULTS))

.PHONY: check-servers
check-servers: build venv-dev $(SERVERS) ## Run the suites that need a real server: PostgreSQL, Consul, NATS, S3, GCS, started by the tests
	@scripts/check_servers

.PHONY: check-slurm
check-slurm: build venv-dev ## Run the suites of the Slurm launcher on a cluster of four nodes on this host; needs root and Debian's slurmctld, slurmd, slurm-client, munge
	@cd services && ../scripts/slurm go test -count 1 -tags slurm ./scheduler/launch/slurm
	@scripts/slurm scripts/e2e e2e/test_slurm.py

.PHONY: check-hosts
check-hosts: build venv-dev $(SERVERS) ## Cut off hosts (network namespaces) of a running job; needs root, otherwise it is skipped
	@scripts/postgres && scripts/e2e e2e/test_hosts.py

.PHONY: check-explain
check-explain: build venv-dev ## Plant stalls in states and in a running job; `rollout explain` must name the root of each
	@cd libs && go test ./explain
	@cd cmd && go test ./rollout -run Explain
	@scripts/e2e e2e/test_explain.py e2e/test_operators.py e2e/test_more_stalls.py e2e/test_traces.py

.PHONY: check-e2e
check-e2e: build venv-dev $(GRPCURL) ## Run the end-to-end scenarios
	@scripts/e2e

# ---- generate ---------------------------------------------------------------------------------

.PHONY: generate
generate: $(BUF) $(RULES) $(PROTOC_GEN_GO) $(PROTOC_GEN_GO_GRPC) $(PROTOC_GEN_JSONSCHEMA) venv-dev ## Regenerate Go, Python and JSON Schema from proto/
	@$(PYTHON) scripts/generate.py

.PHONY: schema-gen
schema-gen: generate ## Regenerate schemas/ (the same as generate)

.PHONY: docs
docs: build ## Regenerate docs/reference/ and the tables of docs/migrating.md, docs/engines.md and docs/metrics.md
	@$(PYTHON) scripts/reference.py && $(PYTHON) scripts/engines.py && $(PYTHON) scripts/metrics.py

.PHONY: oracles
oracles: venv-dev ## Record the answers of TRL, verl, and RLinf again, and regenerate docs/algorithms.md
	@scripts/oracles
	@cd python/tests/algorithms && PYTHONPATH=$(CURDIR)/python $(PYTHON) -m oracle.document

.PHONY: lock
lock: venv ## Resolve the Python dependencies into the hashed locks
	@scripts/lock

.PHONY: clean
clean: ## Remove what was built (keeps .venv and .tools)
	@rm -rf bin demo-out .cache python/.pytest_cache python/.ruff_cache
	@find python -name __pycache__ -type d -prune -exec rm -rf {} +
