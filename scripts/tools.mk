# Command line tools at pinned versions, built into .tools/bin. A version that changes here is built anew
# the next time a target asks for the tool.

# $(call go_tool,VARIABLE,binary,package,version)
define go_tool
$(1) := $(STAMPS)/$(2)-$(4)
$(STAMPS)/$(2)-$(4):
	@echo "installing $(2) $(4)"
	@mkdir -p $(TOOLS) $(STAMPS)
	@GOBIN=$(TOOLS) GOWORK=off GOFLAGS= go install $(3)@$(4)
	@rm -f $(STAMPS)/$(2)-* && touch $$@
endef

$(eval $(call go_tool,BUF,buf,github.com/bufbuild/buf/cmd/buf,v1.73.0))
$(eval $(call go_tool,PROTOC_GEN_GO,protoc-gen-go,google.golang.org/protobuf/cmd/protoc-gen-go,v1.36.12))
$(eval $(call go_tool,PROTOC_GEN_GO_GRPC,protoc-gen-go-grpc,google.golang.org/grpc/cmd/protoc-gen-go-grpc,v1.6.2))
$(eval $(call go_tool,PROTOC_GEN_JSONSCHEMA,protoc-gen-jsonschema,github.com/bufbuild/protoschema-plugins/cmd/protoc-gen-jsonschema,v0.6.0))
$(eval $(call go_tool,GOLANGCI_LINT,golangci-lint,github.com/golangci/golangci-lint/v2/cmd/golangci-lint,v2.15.0))
$(eval $(call go_tool,GRPCURL,grpcurl,github.com/fullstorydev/grpcurl/cmd/grpcurl,v1.9.3))

# validate.proto, the rules that the contracts import: copied out of its Go module, the second module of buf.yaml.
RULES_VERSION := v1.2.2
RULES := $(STAMPS)/protovalidate-$(RULES_VERSION)
$(RULES):
	@mkdir -p .tools/protovalidate/buf/validate $(STAMPS)
	@folder=$$(GOWORK=off go mod download -json github.com/bufbuild/protovalidate@$(RULES_VERSION) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'); \
	  install -m 644 "$$folder/proto/protovalidate/buf/validate/validate.proto" .tools/protovalidate/buf/validate/
	@rm -f $(STAMPS)/protovalidate-* && touch $@

# Real servers for the suites that need one (`make servers`, `make check-servers`). versitygw speaks S3, fake-gcs-server GCS.
$(eval $(call go_tool,VERSITYGW,versitygw,github.com/versity/versitygw/cmd/versitygw,v1.8.0))
$(eval $(call go_tool,FAKE_GCS,fake-gcs-server,github.com/fsouza/fake-gcs-server,v1.56.1))

# The NATS server at the version that libs links.
NATS_VERSION := $(shell sed -n 's|^\tgithub.com/nats-io/nats-server/v2 ||p' libs/go.mod)
NATS_SERVER := $(STAMPS)/nats-server-$(NATS_VERSION)
$(NATS_SERVER):
	@echo "installing nats-server $(NATS_VERSION)"
	@mkdir -p $(TOOLS) $(STAMPS)
	@GOBIN=$(TOOLS) GOWORK=off GOFLAGS= go install github.com/nats-io/nats-server/v2@$(NATS_VERSION)
	@rm -f $(STAMPS)/nats-server-* && touch $@

# Consul: its module has local replaces, which `go install` refuses, so a copy of it is built. The last version under the MPL.
CONSUL_VERSION := v1.16.2
CONSUL := $(STAMPS)/consul-$(CONSUL_VERSION)
$(CONSUL):
	@echo "installing consul $(CONSUL_VERSION) (three minutes, once)"
	@mkdir -p $(TOOLS) $(STAMPS)
	@folder=$$(GOWORK=off go mod download -json github.com/hashicorp/consul@$(CONSUL_VERSION) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'); \
	  copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; cp -r "$$folder/." "$$copy/" && chmod -R u+w "$$copy" && \
	  cd "$$copy" && GOWORK=off GOFLAGS= go build -o $(TOOLS)/consul .
	@rm -f $(STAMPS)/consul-* && touch $@

SERVERS := $(CONSUL) $(VERSITYGW) $(FAKE_GCS) $(NATS_SERVER)
