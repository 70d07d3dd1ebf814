# rollout: `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

MODULES := proto database libs services cmd
TOOLS := $(CURDIR)/.tools/bin
STAMPS := $(CURDIR)/.tools/stamps
VENV := $(CURDIR)/.venv
PYTHON := $(VENV)/bin/python

include scripts/tools.mk

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*## ' Makefile | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

.PHONY: generate
generate: $(BUF) $(PROTOC_GEN_GO) $(PROTOC_GEN_GO_GRPC) $(PROTOC_GEN_JSONSCHEMA) $(PYTHON) ## Regenerate Go, Python and JSON Schema from proto/
	@$(PYTHON) scripts/generate.py
