#!/bin/sh
# A public load generator for OpenAI servers, guidellm, against serve.py: the demo model for real, and
# a priced LLaMA-13B on an A6000. Its packages go into an environment of their own, in FOLDER; that
# takes some gigabytes. It needs the package index once, and no model hub.
#
#     sh experiments/guidellm.sh FOLDER
set -eu
folder=${1:?give a folder for the environment of guidellm}
python="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python"
serve="$(dirname "$0")/../serve.py"
mkdir -p "$folder"
test -x "$folder/bin/guidellm" || { "$python" -m venv "$folder"; "$folder/bin/pip" install -q guidellm==0.8.1; }
export HF_HUB_OFFLINE=1
server=

stop() { test -z "$server" || { kill "$server"; wait "$server" || true; server=; }; }
trap stop EXIT

start() { # arguments of serve.py: start it, and wait for its address
    "$python" "$serve" --port 0 "$@" >"$folder/said" 2>"$folder/log" &
    server=$!
    until grep -q '^page' "$folder/said"; do kill -0 "$server"; sleep 0.2; done
    address=$(sed -n 's|^page *\(http://[^/]*\)/|\1|p' "$folder/said")
}

prompts() { # words of a prompt, at least and at most, and output tokens
    "$python" -c '
import random, sys
least, most, *tokens = map(int, sys.argv[1:])
draw = random.Random(0)
print("prompt,output_tokens_count")
for _ in range(400):
    words = draw.choices(["the", "with", "statement", "list", "type", "return", "class"], k=draw.randint(least, most))
    print(" ".join(words), draw.randint(*tokens), sep=",")
' "$@" >"$folder/prompts.csv"
}

load() { # name of the row, model, profile, requests
    "$folder/bin/guidellm" run --disable-console \
        --backend "kind=openai_http,target=$address,request_format=/v1/completions,model=$2" \
        --profile "$3" --constraint "kind=max_requests,count=$4" \
        --data "kind=csv_file,path=$folder/prompts.csv" \
        --output "kind=json,path=$folder/out.json" >"$folder/guidellm.log" 2>&1
    "$python" -c '
import json, sys
(run,) = json.load(open(sys.argv[2]))["benchmarks"]
metrics = run["metrics"]
total = metrics["request_totals"]
def of(name, which="successful"):
    return metrics[name][which]
first, gap = of("time_to_first_token_ms"), of("inter_token_latency_ms")
print("%-38s %4d %4d  %8.1f %8.1f  %7.2f %7.2f  %8.0f" % (
    sys.argv[1], total["successful"], total["errored"] + total["incomplete"],
    first["median"], first["percentiles"]["p95"], gap["median"], gap["percentiles"]["p95"],
    of("output_tokens_per_second")["mean"]))
' "$1" "$folder/out.json"
}

echo '                                            requests   TTFT, ms            ITL, ms           output'
echo 'what is asked                            good  bad    median      P95   median     P95  tokens/s'
prompts 3 60 16 64
start --policy sarathi_serve
load 'demo, 1 at once' demo kind=synchronous 40
load 'demo, 8 at once' demo kind=concurrent,streams=8 120
load 'demo, 64 at once (B = 8)' demo kind=concurrent,streams=64 200
stop
prompts 300 900 40 160
for policy in vllm_v0 sarathi_serve; do
    start --gpu a6000 --model llama-13b --policy "$policy" --chunk-size 512
    # Evenly spaced. Each worker of guidellm 0.8.1 draws the same "random" moments for kind=poisson, so
    # requests come in bunches, and in other ones at each run: no two runs could be compared.
    load "priced, $policy, 0.8 requests/s" llama-13b kind=constant,rate=0.8 60
    stop
done
