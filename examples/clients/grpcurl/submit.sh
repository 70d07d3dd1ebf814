#!/bin/sh
# Plans a configuration, runs it, and follows it to its end, with only grpcurl and the reflection of the server.
#
#   examples/clients/grpcurl/submit.sh STATE_DIR CONFIG.toml [a.b=VALUE ...]
set -eu
state=$1
config=$2
shift 2

field() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" | head -n 1; }
address=$(field grpc <"$state/rolloutd.json")
token=$(cat "$(field token_file <"$state/rolloutd.json")")
base=$(cd "$(dirname "$config")" && pwd)
call() { grpcurl -plaintext -H "authorization: Bearer $token" -d "$1" "$address" "$2"; }

overrides=
for override in "$@"; do
  escaped=$(printf '%s' "$override" | sed 's/\\/\\\\/g; s/"/\\"/g')
  overrides="$overrides${overrides:+,}\"$escaped\""
done
toml=$(base64 <"$config" | tr -d '\n')
planned=$(call "{\"source\":{\"toml\":\"$toml\",\"file\":\"$config\",\"baseDir\":\"$base\",\"set\":[$overrides]}}" \
  rollout.plan.v1.PlannerService/CreatePlan)
lock=$(printf '%s' "$planned" | field lock)
if [ -z "$lock" ]; then
  printf '%s\n' "$planned" >&2
  exit 65
fi
run=$(call "{\"lock\":\"$lock\",\"baseDir\":\"$base\"}" rollout.run.v1.SchedulerService/CreateRun | field runId)
echo "$run"
call "{\"runId\":\"$run\"}" rollout.run.v1.SchedulerService/WatchRun |
  sed -n 's/^ *"\(state\|step\)": *"\([^"]*\)".*/\2/p' | uniq
call "{\"runId\":\"$run\"}" rollout.run.v1.SchedulerService/GetRun | grep -q RUN_STATE_SUCCEEDED
