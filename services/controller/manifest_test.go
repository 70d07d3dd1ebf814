package controller

import (
	"testing"

	"google.golang.org/protobuf/proto"

	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

func TestAWorkerIsSentAllButTensorsAndFiles(t *testing.T) {
	t.Parallel()
	full := &weightsv1.WeightsManifest{
		RunId: "run-1", Version: 3, Digest: digestOf("3"), Directory: "/v3", Dtype: "float32", Bytes: 64, Form: weightsv1.WeightsForm_WEIGHTS_FORM_ADAPTER,
		Tensors: []*weightsv1.Tensor{{Name: "w", Digest: digestOf("w")}}, Files: []*weightsv1.WeightsFile{{Name: "model.safetensors", Bytes: 64}},
	}
	fields := full.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !full.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("set %s here, and decide in withoutContents whether it is sent", fields.Get(i).Name())
		}
	}
	want := proto.CloneOf(full)
	want.Tensors, want.Files = nil, nil
	if got := withoutContents(full); !proto.Equal(want, got) {
		t.Errorf("sent %v, want %v", got, want)
	}
}
