#!/bin/sh
# llm_cli.sh URL: one round of the command `llm` against the server at URL, which serves glm5-nano without keys.
[ -n "$1" ] || { sed -n 2p "$0"; exit 2; }
LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
trap 'rm -r "$LLM_USER_PATH"' EXIT
cat >"$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: nano
  model_name: glm5-nano
  api_base: "${1%/}/v1"
- model_id: nano-unknown
  model_name: gpt-4o
  api_base: "${1%/}/v1"
- model_id: nano-plain
  model_name: glm5-nano
  api_base: "${1%/}/v1"
  completion: true
YAML
verse='If ye know these things, happy are ye if ye do them.'
failed=0
check() { # NAME FOUND EXPECTED
    if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "FAIL $1: $2"; failed=1; fi
}
llm --version
check "streamed" "$(llm -m nano -o temperature 0 --key none 'John 13:17')" "$verse"
check "whole" "$(llm -m nano -o temperature 0 --key none --no-stream 'John 13:17')" "$verse"
check "usage" "$(llm -m nano -o temperature 0 --key none -u 'John 13:17' 2>&1 >/dev/null | grep -o '10 input, 17 output')" "10 input, 17 output"
check "a conversation goes on" "$(llm -c -m nano -o temperature 0 -o max_tokens 5 --key none 'Acts 12:24' | wc -w | tr -d ' ')" "4"
check "an option of its own" "$(llm -m nano -o temperature 0 -o max_tokens 4 --key none 'John 13:17')" "If ye know"
check "a plain completion" "$(llm -m nano-plain -o temperature 0 -o max_tokens 4 --key none 'In the beginning God' | wc -l | tr -d ' ')" "1"
llm -m nano-unknown --key none x >"$LLM_USER_PATH/said" 2>&1
check "an unknown model is an error that names it (exit code, lines)" "$? $(grep -c '404.*gpt-4o' "$LLM_USER_PATH/said")" "1 1"
llm -m nano -o temperature 0 -o max_tokens 384 --key none x >"$LLM_USER_PATH/said" 2>&1
check "over the context is an error with its numbers (exit code, lines)" "$? $(grep -c '400.*384' "$LLM_USER_PATH/said")" "1 1"
exit $failed
