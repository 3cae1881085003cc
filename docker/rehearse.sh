#!/usr/bin/env bash
# The image without Docker: its install steps in a fresh folder, then its entrypoint on the demo.
#   docker/rehearse.sh [FOLDER]      $PYTHON and $TORCH as in install.sh (a CPU build will do)
# As root the entrypoint runs as the image's user. The server is the wheel's: no image is here.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp --directory /tmp/gptoss-rehearsal.XXXXXX)}
user=$(sed -n 's/^USER //p' "$root/docker/Dockerfile" | tail -1)
environment=$folder/opt
export EXTRAS=server,gpu,openai GPTOSS_CACHE=$folder/cache

step() { printf '\n== %s\n' "$*"; "$@"; }
mkdir -p "$GPTOSS_CACHE"
step "$root/docker/install.sh" dependencies "$environment" "$root/pyproject.toml"
step "$root/docker/install.sh" package "$environment" "$root"
step "$root/docker/install.sh" kernels "$environment" "$GPTOSS_CACHE"
as=()
base=$("$environment/bin/python" -c 'import sys; print(sys.base_prefix)')
# A Python under /root is nobody else's: then it stays root, and says so at the end.
if [[ $(id -u) -eq 0 ]] && setpriv --reuid "$user" --regid 0 --clear-groups test -r "$base/lib"; then
  chmod 755 "$folder"
  chown -R "$user:0" "$GPTOSS_CACHE"
  as=(setpriv --reuid "$user" --regid 0 --clear-groups)
fi
# Word for word what the Dockerfile has, the executable and the ports apart.
mapfile -t entrypoint < <("$environment/bin/python" - "$root/docker/Dockerfile" <<'PYTHON'
import json, re, sys

text = open(sys.argv[1]).read()
for name in ("ENTRYPOINT", "CMD"):
    print(*json.loads(re.findall(rf"^{name} (.+)$", text, re.MULTILINE)[-1]), sep="\n")
PYTHON
)
ports=(--http-port 18000 --grpc-port 18001 --metrics-port 18002 --openai-port 19000)
printf '\n== %s\n' "${entrypoint[*]} ${ports[*]}"
cd "$folder"
env HOME="$GPTOSS_CACHE" PATH="$environment/bin:$PATH" "${as[@]}" "${entrypoint[@]}" "${ports[@]}" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until curl --silent --fail --output /dev/null localhost:19000/health; do
  kill -0 "$server" 2>/dev/null || { wait "$server"; exit 1; }
  sleep 0.5
done
answer=$(curl --silent localhost:18000/v2/models/gpt_oss/generate \
  --data '{"text_input": "What is 17 + 25?", "temperature": 0}')
echo "$answer"
[[ $answer == *"17 + 25 = 42"* ]] || { echo "rehearse.sh: that is no 42" >&2; exit 1; }
echo "serving as user $(ps -o uid= -p "$server" | tr -d ' ')"
kill -TERM "$server"
wait "$server" && code=0 || code=$?
trap - EXIT
[[ $code -eq 0 ]] || { echo "rehearse.sh: SIGTERM ended it with $code, expected 0" >&2; exit 1; }
echo "SIGTERM drained it: exit code 0"
