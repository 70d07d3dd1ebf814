// Package lock writes and reads `plan.lock`: the canonical JSON of a plan, addressed by its
// content.
//
// Canonical means: ProtoJSON with the names of the contract (64-bit integers are strings; unset
// fields are absent), keys sorted, two spaces of indentation, one newline at the end. The plan id
// is the content id of the same JSON in the compact form of RFC 8785 without `plan_id`, so white
// space does not change it.
package lock

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"buf.build/go/protovalidate"
	"github.com/rollout-rl/rollout/libs/id"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Write sets the id of the plan and returns the bytes of its file.
func Write(plan *planv1.Plan) ([]byte, error) {
	plan.PlanId = ""
	planID, err := id.Message(plan)
	if err != nil {
		return nil, fmt.Errorf("address the plan: %w", err)
	}
	plan.PlanId = planID
	compact, err := id.CanonicalJSON(plan)
	if err != nil {
		return nil, fmt.Errorf("write the plan: %w", err)
	}
	var b bytes.Buffer
	if err := json.Indent(&b, compact, "", "  "); err != nil {
		return nil, fmt.Errorf("indent the plan: %w", err)
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

const again = "create it again with `rollout plan`; plans must not be edited"

var placeInMessage = regexp.MustCompile(`\(line (\d+):(\d+)\): `)

// Read reads the file of a plan; name is its name in messages. The plan is nil if there are
// problems.
func Read(data []byte, name string) (*planv1.Plan, []*planv1.Problem) {
	bad := func(line, column uint32, message, fix string) []*planv1.Problem {
		p := &planv1.Problem{Reason: problem.BadPlan, File: name, Line: line, Column: column, Message: message, Fix: fix}
		if lines := bytes.Split(data, []byte("\n")); line > 0 && int(line) <= len(lines) {
			p.Excerpt = problem.Excerpt(strings.ToValidUTF8(string(lines[line-1]), "\uFFFD"))
		}
		return []*planv1.Problem{p}
	}
	var head struct {
		Format *json.Number `json:"format"`
	}
	var syntax *json.SyntaxError
	switch err := json.Unmarshal(data, &head); {
	case err != nil && strings.HasSuffix(name, ".toml"):
		return nil, bad(1, 1, "this is a configuration, not a plan", "pass it with --config, or create a plan with `rollout plan`")
	case errors.As(err, &syntax):
		at := min(max(int(syntax.Offset)-1, 0), len(data))
		start := bytes.LastIndexByte(data[:at], '\n') + 1
		line := bytes.Count(data[:start], []byte("\n")) + 1
		return nil, bad(uint32(line), uint32(utf8.RuneCount(data[start:at])+1), "the plan is not JSON: "+syntax.Error(), again)
	case err != nil:
		return nil, bad(1, 1, "the file is not a plan: "+err.Error(), "pass a file that `rollout plan` wrote")
	case head.Format == nil:
		return nil, bad(1, 1, "the file is not a plan: it has no `format`", "pass a file that `rollout plan` wrote")
	case head.Format.String() != strconv.Itoa(planformat.Format):
		problems := bad(1, 1, fmt.Sprintf("the plan has format %s; this version of rollout reads format %d", *head.Format, planformat.Format),
			"create it again with `rollout plan`, or use the version of rollout that wrote it")
		problems[0].Reason = problem.PlanFormat
		return nil, problems
	}
	plan := &planv1.Plan{}
	if err := protojson.Unmarshal(data, plan); err != nil {
		line, column, message := split(err.Error())
		return nil, bad(line, column, "the plan has an invalid field: "+message, again)
	}
	if err := protovalidate.Validate(plan); err != nil {
		return nil, bad(1, 1, "the plan is invalid: "+firstLine(err), again)
	}
	bare := proto.CloneOf(plan)
	bare.PlanId = ""
	if planID, err := id.Message(bare); err != nil || planID != plan.GetPlanId() {
		return nil, bad(0, 0, fmt.Sprintf("the content does not match the plan's id %s…: it was edited", short(plan.GetPlanId())), again)
	}
	return plan, nil
}

// split separates the place from a message of protojson.
func split(message string) (line, column uint32, rest string) {
	message = strings.TrimPrefix(strings.ReplaceAll(message, "\u00a0", " "), "proto: ")
	match := placeInMessage.FindStringSubmatch(message)
	if match == nil {
		return 1, 1, message
	}
	l, _ := strconv.ParseUint(match[1], 10, 32)
	c, _ := strconv.ParseUint(match[2], 10, 32)
	return uint32(l), uint32(c), strings.Replace(message, match[0], "", 1)
}

func firstLine(err error) string {
	var invalid *protovalidate.ValidationError
	if errors.As(err, &invalid) && len(invalid.Violations) > 0 {
		return invalid.Violations[0].String()
	}
	return err.Error()
}

func short(planID string) string { return planID[:min(len(planID), 15)] }
