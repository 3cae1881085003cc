"""What is deployed beside the server holds to what a running one says."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from gptoss_backend.gateway import Gateway, bind
from gptoss_backend.installation import find_installation, model_repository
from gptoss_backend.server import Ports, TritonServer

from .clients import eventually
from .conftest import START_SECONDS

DOCKER = Path(__file__).parents[2] / "docker"
# Prometheus makes `up` itself, one a target.
PROMETHEUS_OWN = {"up"}
_KEYWORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset"}


def _metrics_in(expression: str) -> set[str]:
    """The names of a PromQL expression that are neither functions, keywords nor labels."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    names = re.findall(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\w|:|\s*\()", bare)
    return set(names) - _KEYWORDS


def _expressions() -> Iterator[str]:
    rules = yaml.safe_load((DOCKER / "prometheus" / "rules.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])
    board = json.loads((DOCKER / "grafana" / "dashboards" / "gptoss.json").read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
    adapter = yaml.safe_load((DOCKER / "kubernetes" / "prometheus-adapter.yaml").read_text())
    yield from (rule["seriesQuery"] for rule in adapter["rules"]["custom"])


def _exposed(url: str) -> set[str]:
    """The names of all series that `url` has or will have."""
    with urllib.request.urlopen(url, timeout=10) as response:
        types = re.findall(r"^# TYPE (\S+) (\S+)$", response.read().decode(), re.MULTILINE)
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + part for name, kind in types for part in parts.get(kind, ("",))}


@contextmanager
def _plain_server(repository: Path, ports: Ports, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The wheel's tritonserver, told only what NVIDIA's images know by themselves, and ports."""
    installation = find_installation()
    arguments = [str(installation.executable), f"--model-repository={repository}"]
    for name in ("http", "grpc", "metrics"):
        arguments.append(f"--{name}-port={getattr(ports, name)}")
    if installation.backend_folder:
        arguments.append(f"--backend-directory={installation.backend_folder}")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(map(str, installation.library_folders)),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(arguments, env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(ports: Ports) -> bool:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{ports.http}/v2/models/gpt_oss/ready", timeout=5
        ):
            return True
    except OSError:
        return False


def test_names_of_an_expression() -> None:
    expression = 'histogram_quantile(0.9, sum by (le) (rate(a:b_bucket{x="c:d"}[5m]))) > 1 and e:f'
    assert _metrics_in(expression) == {"a:b_bucket", "e:f"}
    assert _metrics_in("rate(vllm:unknown[$__rate_interval]) == 0") == {"vllm:unknown"}


@pytest.mark.server
def test_dashboard_and_alerts_know_only_what_is_exposed(
    server: TritonServer, tmp_path: Path
) -> None:
    settings = {"url": server.ports.url("grpc"), "model_name": "demo"}
    with Gateway("openai", settings, bind("127.0.0.1", 0, "--port"), tmp_path / "log") as gateway:
        gateway.wait_ready(60)
        known = _exposed(f"http://{server.ports.url('metrics')}/metrics")
        known |= _exposed(f"{gateway.url}/metrics") | PROMETHEUS_OWN
    expressions = [*_expressions()]
    assert len(expressions) > 20
    unknown = {name for each in expressions for name in _metrics_in(each)} - known
    assert not unknown
    assert all(_metrics_in(each) for each in expressions)


@pytest.mark.server
@pytest.mark.long
def test_server_without_our_launcher(tmp_path: Path) -> None:
    """`tritonserver --model-repository=…` on the repository as it is, as docker/README.md says."""
    repository = tmp_path / "models"
    shutil.copytree(model_repository(), repository)
    config = repository / "gpt_oss_engine" / "config.pbtxt"
    config.write_text(
        config.read_text()
        + 'parameters [ { key: "default_max_tokens" value { string_value: "3" } } ]\n'
    )
    ports = Ports.free()
    with _plain_server(repository, ports, tmp_path / "log") as process:
        eventually(lambda: _is_ready(ports) or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        body = json.dumps({"text_input": "What is 17 + 25?", "temperature": 0}).encode()
        url = f"http://127.0.0.1:{ports.http}/v2/models/gpt_oss/generate"
        with urllib.request.urlopen(url, body, timeout=60) as response:
            answer = json.load(response)
    assert (answer["num_output_tokens"], answer["finish_reason"]) == (3, "length")
