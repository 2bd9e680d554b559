"""Job scripts of ``asa launch``: what a shell, a YAML reader and Python make of them, and what they ask for."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nouns
import pytest
from refusals import user_folder

from asa.cli import choose, entry
from asa.cli.console import Console
from asa.errors import UsageError
from asa.ir import codec
from asa.ir.cluster import Level, RankDevice
from asa.ir.plan import Plan, Stage
from asa.report import jobs

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests")


def plan_for(ranks: int, device: str = "cuda") -> Plan:
    """Data parallel over many ranks: the shape is all that counts here."""
    base = nouns.plan()
    components = tuple(
        replace(c, stage=0, data=replace(c.data, degree=ranks), tensor=replace(c.tensor, strategy="none", degree=1))
        for c in base.components
    )
    stage = Stage(ranks=tuple(range(ranks)))
    prediction = replace(base.prediction, memory_bytes_per_rank=(1,) * ranks)
    return replace(
        base, gpus=ranks, components=components, stages=(stage,), schedule="none", num_microbatches=1,
        device_type=device, prediction=prediction,
    )  # type: ignore[arg-type]  # fmt: skip


def job(ranks: int = 16, per_node: int = 8, **changes: Any) -> jobs.Job:
    usual: dict[str, Any] = {"plan_file": "runs/plans/a plan.json", "out": "runs/train/one", "plan": plan_for(ranks)}
    return jobs.Job(per_node=per_node, **(usual | changes))


def test_machines_follow_the_innermost_links() -> None:
    cluster = nouns.cluster()
    level = cluster.levels[0]

    def of(*levels: tuple[str, int]) -> Any:
        made = tuple(Level(name=n, devices=d, tables=level.tables) for n, d in levels)
        return replace(cluster, num_devices=levels[-1][1], levels=made)

    assert jobs.per_node(plan_for(16), of(("NVSwitch", 8), ("InfiniBand", 16)), None) == 8
    assert jobs.per_node(plan_for(4), of(("NVSwitch", 8)), None) == 4
    assert jobs.per_node(plan_for(8), of(("Ethernet 25G", 8)), None) == 1
    assert jobs.per_node(plan_for(16), None, None) == 8
    assert jobs.per_node(plan_for(12), None, 4) == 4
    domain = replace(of(("NVLink of a rack", 16)), devices_per_host=4)
    assert jobs.per_node(plan_for(16), domain, None) == 4
    with pytest.raises(UsageError, match=r"12 ranks do not fill machines of 8 evenly; --gpus-per-node 6 takes 2 mach"):
        jobs.per_node(plan_for(12), None, None)


def test_slurm_asks_for_what_the_plan_needs() -> None:
    text = jobs.slurm(job(limit_s=5400.0, partition="gpu", arguments=("--epochs", "90"), image="ghcr.io/me/asa:1"))
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "1")
    assert (asked["time"], asked["partition"], asked["signal"]) == ("01:30:00", "gpu", "TERM@120")
    assert asked["cpus-per-task"] == "64"
    assert "account" not in asked
    mine = jobs.slurm(job(account="proj7", qos="long", cpus=24))
    assert "#SBATCH --account=proj7\n#SBATCH --qos=long\n" in mine
    assert "#SBATCH --cpus-per-task=24\n" in mine
    assert "#SBATCH --requeue" in text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    assert "--container-image=ghcr.io/me/asa:1" in text
    assert '--container-mounts="$PWD" --container-workdir="$PWD"' in text
    assert "'runs/plans/a plan.json'" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(("limit_s", "fits"), [(30.0, False), (180.0, False), (299.0, False), (300.0, True)])
def test_a_slurm_job_has_time_to_train_before_it_is_told_to_stop(limit_s: float, fits: bool) -> None:
    if fits:
        assert "--time=00:05:00" in jobs.slurm(job(limit_s=limit_s))
        return
    with pytest.raises(UsageError, match=rf"a job of {limit_s:g} s would be told to stop 120 s before .* --time 5m"):
        jobs.slurm(job(limit_s=limit_s))


def _program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (None, False)])
def test_the_slurm_script_ends_as_the_run_did(tmp_path: Path, code: int | None, requeued: bool) -> None:
    """The real script in a real shell; srun, scontrol and torchrun are stand-ins."""
    tools = tmp_path / "bin"
    tools.mkdir()
    result = json.dumps({"kind": "result", "exit_code": code, "epochs": [1]}, indent=1)
    wrote = "" if code is None else f"echo '{result}' >runs/train/one/result.json"
    _program(
        tools, "srun",
        f'echo "srun $@" >>calls\nuntil [ "$1" = bash ]; do shift; done\n'
        f'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done\n{wrote}',
    )  # fmt: skip
    _program(tools, "torchrun", 'echo "torchrun $@" >>calls')
    _program(tools, "scontrol", 'echo "scontrol $@" >>calls\necho node-a')
    # A host whose Python is in the container: nothing is called python.
    for name in ("bash", "sed", "head", "mkdir", "rm", "echo"):
        (tools / name).symlink_to(shutil.which(name) or name)
    (tmp_path / "runs/train/one/checkpoints/step_00000007").mkdir(parents=True)
    (tmp_path / "runs/train/one/result.json").write_text('{"exit_code": 0}')
    environment = os.environ | {
        "PATH": str(tools), "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node-[a-b]"
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", jobs.slurm(job())], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (6 if code is None else code), done.stderr
    calls = (tmp_path / "calls").read_text()
    assert "--nnodes 2 --nproc-per-node 8 --max-restarts 3" in calls
    assert "--rdzv-endpoint node-a:20041 --rdzv-id 41-0" in calls
    srun = next(line for line in calls.split("\n") if line.startswith("srun "))
    assert "--cpus-per-task=64" in srun, "srun does not inherit what sbatch was asked for"
    machines = [line for line in calls.split("\n") if line.startswith("torchrun ")]
    assert ["is_host=true" in line for line in machines] == [True, False], "the first machine hosts the meeting"
    assert all(line.endswith("--out runs/train/one --resume") for line in machines)
    assert ("requeue 41" in calls) is requeued


def test_part_of_a_second_is_a_time_for_a_pod_too() -> None:
    assert "activeDeadlineSeconds: 1\n" in jobs.kubernetes(job(image="asa:1", limit_s=0.5))


def test_kubernetes_gets_a_config_map_a_service_and_an_indexed_job() -> None:
    text = jobs.kubernetes(
        job(plan_file="/plan/plan.json", image="asa:1", limit_s=60.0, plan_text=codec.dumps(plan_for(16)))
    )
    config, service, found = yaml.safe_load_all(text)
    assert codec.loads(Plan, config["data"]["plan.json"], source="manifest") == plan_for(16)
    assert service["spec"]["clusterIP"] == "None" or service["spec"]["clusterIP"] is None
    spec = found["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["activeDeadlineSeconds"] == 60
    codes = [r["onExitCodes"]["values"] for r in spec["podFailurePolicy"]["rules"] if "onExitCodes" in r]
    assert codes == [[75]]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["resources"]["requests"] == {"cpu": 64, "memory": "32Gi"}
    assert next(v for v in pod["volumes"] if v["name"] == "memory")["emptyDir"]["sizeLimit"] == "8Gi"
    conditions = [c for r in spec["podFailurePolicy"]["rules"] for c in r.get("onPodConditions", [])]
    assert conditions == [{"type": "DisruptionTarget", "status": "True"}]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    script = container["args"][0]
    assert f"{service['metadata']['name']}-0.{service['metadata']['name']}:29400" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    named = list(yaml.safe_load_all(jobs.kubernetes(job(image="1.5", volume="123"))))[-1]["spec"]["template"]["spec"]
    assert named["containers"][0]["image"] == "1.5"
    assert named["volumes"][1]["persistentVolumeClaim"]["claimName"] == "123", "a name, not a number"
    with pytest.raises(UsageError, match="--image"):
        jobs.kubernetes(job())


def test_a_pod_forwards_the_request_to_stop_and_ends_with_75(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    body = "trap 'echo {\\\"exit_code\\\": 75} >runs/train/one/result.json; exit 1' TERM\n"
    _program(tools, "torchrun", body + "kill -TERM $PPID\nfor i in $(seq 2000); do sleep 0.05; done")
    _, _, found = yaml.safe_load_all(jobs.kubernetes(job(image="asa:1")))
    script = found["spec"]["template"]["spec"]["containers"][0]["args"][0]
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=False, timeout=240)
    assert done.returncode == 75


def assigned(text: str) -> dict[str, ast.expr]:
    """Values of a driver's module, by their names."""
    return {ast.unparse(n.targets[0]): n.value for n in ast.parse(text).body if isinstance(n, ast.Assign)}


def carried_by(text: str) -> dict[str, str]:
    """Files that a driver writes on every machine."""
    return ast.literal_eval(assigned(text)["FILES"])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ray_gets_a_driver_that_python_reads(device: str) -> None:
    text = jobs.ray(replace(job(arguments=("--data", "cifar100")), plan=plan_for(16, device)))
    words = ast.literal_eval(assigned(text)["WORDS"])
    assert words[2:] == ["train", "runs/plans/a plan.json", "--out", "runs/train/one", "--data", "cifar100"]
    assert "NODES, PER_NODE, RESTARTS, LIMIT_S = 2, 8, 3, None" in text
    assert ('"GPU": 8' in text) is (device == "cuda")


def test_the_command_writes_and_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codec.save(plan_for(16), Path("plan.json"))
    words = ["launch", "slurm", "plan.json", "--train", "--epochs 90", "--time", "2h", "-o", "jobs/one.sh", "--json"]
    assert entry.run(words) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["kind"], document["nodes"], document["ranks_per_node"]) == ("job", 2, 8)
    assert document["text"] == Path("jobs/one.sh").read_text()
    assert "sbatch jobs/one.sh" in said.err
    assert entry.run(["launch", "slurm", "plan.json", "--train", "--out elsewhere"]) == 2
    assert "the job's own" in capsys.readouterr().err
    for slip, words in (("--epochz 90", "did you mean --epochs"), ("--epochs 0", "0 is below 1"), ("b.json", "b.json")):
        assert entry.run(["launch", "slurm", "plan.json", "--train", slip]) == 2
        assert words in capsys.readouterr().err
    assert entry.run(["launch", "slurm", "plan.json", "-o", "my jobs/one.sh"]) == 0
    assert "sbatch 'my jobs/one.sh'" in capsys.readouterr().err
    assert entry.run(["launch", "lsf", "plan.json"]) == 2
    assert entry.run(["launch", "k8s", "plan.json"]) == 0
    said = capsys.readouterr()
    assert 'image: "asa:latest"' in said.out
    assert "name yours with --image" in said.err


@pytest.mark.parametrize("option", ["partition", "account", "qos", "image", "volume"])
def test_a_name_that_would_break_a_job_file_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    system = "k8s" if option == "volume" else "slurm"
    for bad in ("a b", "a: b", "a\nb", 'a"b', ""):
        assert entry.run(["launch", system, "plan.json", f"--{option}", bad]) == 2
        assert capsys.readouterr().err.startswith(f"asa: --{option}: ")


def test_what_a_plan_was_made_from_travels_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = user_folder(tmp_path, monkeypatch)
    assert entry.run(["plan", "profiles/tiny.json", "--cluster", "profiles/cluster.box.json", "-o", "plan.json"]) == 0
    plan = codec.load(Plan, Path("plan.json"))
    shutil.rmtree(folder / "profiles")  # measured anew, or on another machine
    assert entry.run(["simulate", "plan.json"]) == 0
    assert entry.run(["launch", "k8s", "plan.json", "-o", "job.yaml"]) == 0
    assert "plan again" not in capsys.readouterr().err
    config, _, found = yaml.safe_load_all(Path("job.yaml").read_text())
    assert config["data"].keys() == {f"{n}.json" for n in ("plan", plan.profile_fingerprint, plan.cluster_fingerprint)}
    # The pod's own script, on a machine that has only the mounted files.
    there = tmp_path / "pod"
    (there / "plan").mkdir(parents=True)
    for name, text in config["data"].items():
        (there / "plan" / name).write_text(text)
    tools = tmp_path / "bin"
    tools.mkdir()
    _program(tools, "torchrun", "exit 0")
    script = found["spec"]["template"]["spec"]["containers"][0]["args"][0].replace("/plan/", f"{there}/plan/")
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"}
    subprocess.run(["bash", "-c", script], cwd=there, env=environment, check=False, timeout=240)
    monkeypatch.chdir(tmp_path)
    (folder / "profiles").mkdir()  # as launch finds them, by what was kept
    assert entry.run(["launch", "ray", "plan.json", "-o", "job.py"]) == 0
    files = carried_by(Path("job.py").read_text())
    assert files.keys() == {f"runs/plans/{codec.fingerprint(plan)}.json"} | {
        f"runs/plans/origins/{f}.json" for f in (plan.profile_fingerprint, plan.cluster_fingerprint)
    }
    assert codec.loads(Plan, files[f"runs/plans/{codec.fingerprint(plan)}.json"], source="driver") == plan
    monkeypatch.chdir(there)
    assert choose.origins(plan, Console())[0].model_spec == plan.model_spec
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert entry.run(["launch", "k8s", "plan.json"]) == 0
    said = capsys.readouterr()
    assert "will not plan again" in said.err


class Ray(ModuleType):
    """Ray's calls that the driver makes, on one machine: every actor's method runs in a thread."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.util = SimpleNamespace(remove_placement_group=lambda _: None, get_node_ip_address=lambda: "192.0.2.7")
        self.asked: list[Any] = []
        self.pool = ThreadPoolExecutor(4)

    def remote(self, cls: type) -> Any:
        def made(**options: Any) -> Any:
            self.asked.append(options)
            actor = cls()
            calls = {
                n: SimpleNamespace(remote=partial(self.pool.submit, getattr(actor, n)))
                for n in ("address", "prepare", "run")
            }
            return SimpleNamespace(remote=lambda: SimpleNamespace(**calls))

        return SimpleNamespace(options=made)

    def init(self) -> None:
        """Nothing to start."""

    def get(self, what: Any) -> Any:
        return [w.result() for w in what] if isinstance(what, list) else what if what is None else what.result()


def test_one_machine_of_ray_hosts_the_rendezvous_and_is_told_so(tmp_path, monkeypatch, capsys):
    tools = tmp_path / "bin"
    tools.mkdir()
    result = "mkdir -p runs/train/one; echo '{\"exit_code\": 0}' >runs/train/one/result.json"
    _program(tools, "torchrun", f'echo "$@" >>calls.$$; {result}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    ray = Ray()
    groups = ModuleType("ray.util.placement_group")
    groups.placement_group = lambda *_, **__: SimpleNamespace(ready=lambda: None)  # type: ignore[attr-defined]
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda *_, **__: None  # type: ignore[attr-defined]
    for module in (ray, groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(SystemExit) as ended:
        exec(compile(jobs.ray(job(cpus=24, plan_text="{}")), "driver.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == 0
    calls = sorted(p.read_text() for p in tmp_path.glob("calls.*"))
    assert [re.findall(r"--rdzv-conf is_host=(\w+)", c) for c in calls] in (
        [["false"], ["true"]],
        [["true"], ["false"]],
    )
    assert len({re.findall(r"--rdzv-endpoint (\S+)", c)[0] for c in calls}) == 1
    assert [o["num_cpus"] for o in ray.asked] == [24, 24]
    assert Path("runs/plans/a plan.json").read_text() == "{}"
    # A machine that has a folder of its own by that name trains nothing that anybody would find.
    driver = jobs.ray(job()).replace("(OUT / mark).exists()", "(Path('elsewhere') / OUT / mark).exists()")
    with pytest.raises(SystemExit) as ended:
        exec(compile(driver, "driver.py", "exec"), {"__name__": "__main__"})
    ray.pool.shutdown()
    assert ended.value.code == 5
    assert "runs/train/one is not shared" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.34"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_manifest_is_of_kubernetes_own_schema(version, device):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas")
    text = jobs.kubernetes(job(image="asa:1", plan=plan_for(16, device), limit_s=60.0))
    for document in yaml.safe_load_all(text):
        validate.validate(document, version, strict=True)


def test_a_job_for_unequal_devices_says_which_rank_is_on_which(tmp_path, monkeypatch, capsys):
    folder = user_folder(tmp_path, monkeypatch)
    codec.save(nouns.profile(), folder / "profiles" / "tiny.json")
    devices = tuple(RankDevice(name=n, speed=s) for n, s in (("slow", 0.5), ("fast", 1.0)))
    codec.save(replace(nouns.cluster(2), devices=devices), folder / "box.json")
    assert entry.run(["plan", "tiny", "--gpus", "2", "--cluster", "box.json", "--strategies", "ddp"]) == 0
    capsys.readouterr()
    assert entry.run(["launch", "slurm"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the plan is for unequal devices, ranks 0 on fast; 1 on slow: machines must come in this order" in said
