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
