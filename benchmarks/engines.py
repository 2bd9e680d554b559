"""Starts the jobs of ``asa launch`` on real engines here, two machines of one CPU rank each, and prints a table.

    python benchmarks/engines.py [torchrun|slurm-script|slurm|ray|kubernetes ...]

Every job trains logistic regression on the digits. Ray and the schemas of Kubernetes are installed in an environment of
their own in runs/engines, once. Slurm's daemons are the machine's; where they, or the rights to start them, are
missing, the row says so. Exit code 1 where a job did not end as it should.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
"""Of the environment that asa and torchrun are in."""
ENVIRONMENT = ROOT / "runs" / "engines" / "environment"
VERSIONS = ("1.27", "1.29", "1.31", "1.33", "1.35", "1.37")
NODES = ("engine-a", "engine-b")
LIMIT_S = 240
LONG = "--data digits --epochs 2000"


class Missing(Exception):
    """An engine that this machine does not have."""


def run(*words: str | Path, cwd: Path, code: int | None = 0, **environment: str) -> str:
    """What a command printed, both streams.

    Raises:
        AssertionError: another exit code than ``code``.
    """
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=surroundings(**environment), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    told = "\n".join(done.stdout.strip().splitlines()[-15:])
    assert code is None or done.returncode == code, (
        f"{shlex.join(map(str, words))} ended with {done.returncode}: {told}"
    )
    return done.stdout


def surroundings(**more: str) -> dict[str, str]:
    """This process's variables without what a launcher or a virtual environment left in them, ``BIN`` first in PATH."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "VIRTUAL_ENV", "PYTHONPATH")}
    return kept | {"PATH": f"{BIN}:{kept['PATH']}", "OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def planned(folder: Path) -> None:
    """A profile and a plan for two ranks in ``folder``."""
    run(BIN / "asa", "profile", "logistic", "--input", "1x8x8", "--classes", "10", "--time-limit", "2s", cwd=folder)
    run(BIN / "asa", "plan", "--gpus", "2", "--strategies", "ddp", "--global-batch", "64", cwd=folder)


def launched(system: str, folder: Path, file: str, train: str, *more: str) -> Path:
    """The job that ``asa launch`` writes: two machines with a rank each, and a run in ``folder``/out."""
    words = (
        "launch",
        system,
        "--gpus-per-node",
        "1",
        "--train",
        train,
        "--out",
        str(folder / "out"),
        "-o",
        file,
        *more,
    )
    said = run(BIN / "asa", *words, cwd=folder)
    assert "will not plan again" not in said, said
    return folder / file


def result(folder: Path, code: int = 0) -> str:
    """How the run in ``folder``/out says that it ended, in words, which has to be with ``code``.

    Raises:
        AssertionError: it ended otherwise, on other ranks, or could not plan again.
    """
    found = json.loads((folder / "out" / "result.json").read_text())
    assert found["exit_code"] == code, found
    events = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    refusals = [e["message"] for e in events if e["event"] == "note" and "re-plan" in e["message"]]
    assert not refusals, refusals
    ranks = next(e["ranks"] for e in events if e["event"] == "start")
    assert ranks == len(NODES), ranks
    return f"{ranks} ranks, {sum(e['event'] == 'epoch' for e in events)} epochs, exit code {code}"


@contextmanager
def running(*words: str | Path, cwd: Path, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended, with all that it started, when this closes."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [str(w) for w in words], cwd=cwd, env=surroundings(**environment), stdin=subprocess.DEVNULL, stdout=stream,
            stderr=stream, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sent)
                process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def until(happened: Callable[[], bool], what: str, log: Path | None = None) -> None:
    """Wait for something.

    Raises:
        AssertionError: it did not come in time.
    """
    end = time.monotonic() + LIMIT_S
    while not happened():
        told = log.read_text(errors="replace")[-1500:] if log and log.exists() else ""
        assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}: {told}"
        time.sleep(0.5)


def in_training(folder: Path) -> bool:
    """Whether a long run has begun to train."""
    log = folder / "out" / "log.jsonl"
    return log.exists() and '"event": "epoch"' in log.read_text()


def torchrun(folder: Path) -> str:
    """Two agents on this machine train a plan; asked to stop, they save; the same command resumes."""
    port = free_port()

    def agent(*more: str) -> tuple[str, ...]:
        (plan,) = (folder / "runs" / "plans").glob("*.json")
        shape = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id x"
        return (
            *shape.split(),
            "--rdzv-endpoint",
            f"localhost:{port}",
            "-m",
            "asa",
            "train",
            str(plan),
            "--out",
            str(folder / "out"),
            "--data",
            "digits",
            *more,
        )

    with ExitStack() as stack:
        agents = [
            stack.enter_context(running(*agent("--epochs", "2000"), cwd=folder, log=folder / "agents.log"))
            for _ in NODES
        ]
        until(lambda: in_training(folder), "the first epoch", folder / "agents.log")
        agents[0].send_signal(signal.SIGTERM)
        for process in agents:
            process.wait(LIMIT_S)
    stopped = result(folder, 75)
    done = len(list((folder / "out" / "checkpoints").glob("step_*")))
    assert done, "no checkpoint"
    with ExitStack() as stack:
        agents = [
            stack.enter_context(running(*agent("--epochs", "1", "--resume"), cwd=folder, log=folder / "again.log"))
            for _ in NODES
        ]
        codes = [process.wait(LIMIT_S) for process in agents]
    assert codes == [0, 0], (codes, (folder / "again.log").read_text()[-1500:])
    return f"{stopped}; resumed: agents 0, 0"


def slurm_script(folder: Path) -> str:
    """Slurm's script with stand-ins for srun, which starts both agents here, and scontrol."""
    job = launched("slurm", folder, "job.sh", "--data digits")
    tools = folder / "tools"
    tools.mkdir()
    both = 'while [[ $1 == --* ]]; do shift; done\n"$@" & one=$!\n"$@" & wait $one; wait $!'
    for name, body in (("srun", both), ("scontrol", "echo localhost")):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{BIN}:{os.environ['PATH']}"
    run("bash", job, cwd=folder, PATH=path, SLURM_JOB_ID=str(free_port()), SLURM_JOB_NODELIST="x")
    return result(folder)


SLURM = """\
ClusterName=engines
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=1 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def slurm(folder: Path) -> str:
    """A two-node Slurm of this machine: a job that ends, and one that is told to stop, saves and queues again."""
    lacking = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "unshare") if not shutil.which(name)]
    if lacking or os.geteuid():
        raise Missing(f"no {', '.join(lacking)} here" if lacking else "only root starts Slurm's daemons")
    home = folder / "slurm"
    home.mkdir(mode=0o755)
    (home / "key").write_bytes(os.urandom(64))
    (home / "key").chmod(0o400)
    ports = [free_port() for _ in range(3)]
    text = SLURM.format(host=socket.gethostname(), folder=home, control=ports[0], ports=ports[1:], nodes=NODES)
    (home / "slurm.conf").write_text(text)
    hosts = Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n"
    (home / "hosts").write_text(hosts)
    conf = {"SLURM_CONF": str(home / "slurm.conf")}

    def daemon(*words: str) -> tuple[str, ...]:
        # The nodes have names here alone: a hosts file that only these processes see.
        inside = f"mount --bind {home}/hosts /etc/hosts && exec {shlex.join(words)}"
        return ("unshare", "--mount", "--propagation", "private", "bash", "-c", inside)

    def client(*words: str) -> str:
        return run(*daemon(*words), cwd=folder, **conf)

    def state(job: str) -> str:
        return re.search(r"JobState=(\S+)", client("scontrol", "show", "job", job)).group(1)  # type: ignore[union-attr]

    with ExitStack() as stack:
        log = home / "daemons.log"
        munge = f"munged --foreground --force --key-file={home}/key --socket={home}/munge.socket"
        munge += f" --pid-file={home}/munge.pid --log-file={home}/munge.log --seed-file={home}/munge.seed"
        stack.enter_context(running(*munge.split(), cwd=home, log=log))
        until(lambda: (home / "munge.socket").exists(), "munged", log)
        stack.enter_context(running(*daemon("slurmctld", "-D"), cwd=home, log=log, **conf))
        for name in NODES:
            stack.enter_context(running(*daemon("slurmd", "-D", "-N", name), cwd=home, log=log, **conf))
        until(lambda: client("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "two idle nodes", log)
        job = launched("slurm", folder, "job.sh", "--data digits")
        number = client("sbatch", "--parsable", str(job)).strip()
        until(lambda: state(number) in ("COMPLETED", "FAILED", "CANCELLED"), "the job to end", home / "slurmctld.log")
        logs = "\n".join(p.read_text()[-1500:] for p in folder.glob("asa-*.log"))
        assert state(number) == "COMPLETED", logs
        whole = result(folder)
        shutil.rmtree(folder / "out")
        job = launched("slurm", folder, "long.sh", LONG)
        number = client("sbatch", "--parsable", str(job)).strip()
        until(lambda: in_training(folder), "the first epoch", home / "slurmctld.log")
        client("scancel", "--signal=TERM", number)
        until(lambda: "Restarts=1" in client("scontrol", "show", "job", number), "the job to queue again", log)
        stopped = result(folder, 75)
        client("scancel", number)
    return f"{whole}; told to stop: {stopped}, queued again"


def installed() -> Path:
    """The folder of programs of an environment with Ray and Kubernetes' schemas, to try this project's jobs on."""
    done = ENVIRONMENT / "installed"
    if not done.exists():
        uv = [sys.executable, "-m", "uv"]
        for words in (["venv", "--quiet", "--clear", "--python", sys.executable, str(ENVIRONMENT)],
                      ["pip", "install", "--quiet", "--python", str(ENVIRONMENT / "bin" / "python"), "ray[default]",
                       "kubernetes-validate"]):  # fmt: skip
            run(*uv, *words, cwd=ROOT)
        done.touch()
    return ENVIRONMENT / "bin"


def ray(folder: Path) -> str:
    """Two Ray nodes on this machine; a folder with nothing in it but the driver is submitted."""
    ray = installed() / "ray"
    # Its Python and the torchrun of this one; and workers as nice as everything else, not by 15.
    variables = {"PATH": f"{ray.parent}:{BIN}:{os.environ['PATH']}", "RAY_worker_niceness": "0"}
    ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
    (folder / "submitted").mkdir()
    job = launched("ray", folder, "submitted/job.py", "--data digits --epochs 2")
    shutil.rmtree(folder / "profiles")
    shutil.rmtree(folder / "runs")
    usual = ("--num-cpus", "1", "--disable-usage-stats", "--block", "--temp-dir")
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # names of its sockets must be short
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        flags = [w for name, port in ports.items() for w in (f"--{name}", str(port))]
        head = (ray, "start", "--head", "--node-ip-address", "127.0.0.1", *flags, *usual, temporary)
        address = f"127.0.0.1:{ports['port']}"

        def status() -> str:
            return run(ray, "status", "--address", address, cwd=folder, code=None)

        def start(name: str, nodes: int, *words: str | Path) -> None:
            """Start a node until there are ``nodes``: Ray ends one that takes more than 30 s, as on a busy machine."""
            log = folder / f"{name}.log"
            node = [stack.enter_context(running(*words, cwd=folder, log=log, **variables))]

            def there() -> bool:
                if node[-1].poll() is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(node[-1].pid, signal.SIGKILL)
                    node.append(stack.enter_context(running(*words, cwd=folder, log=log, **variables)))
                return status().count("1 node_") == nodes

            until(there, f"Ray's {name} node", log)

        start("first", 1, *head)
        other = ("--address", address, "--dashboard-agent-listen-port", str(free_port()), *usual, temporary)
        start("second", 2, ray, "start", *other)
        dashboard = f"http://127.0.0.1:{ports['dashboard-port']}"
        run(
            ray, "job", "submit", "--address", dashboard, "--working-dir", job.parent, "--", "python", job.name,
            cwd=folder, **variables,
        )  # fmt: skip
    version = run(ray, "--version", cwd=folder).split()[-1]
    return f"{result(folder)} (Ray {version})"


def kubernetes(folder: Path) -> str:
    """The manifest against the schemas of several versions, and the command of both pods in shells of this machine."""
    job = launched("k8s", folder, "job.yaml", "--data digits")
    validate = installed() / "kubernetes-validate"
    for version in VERSIONS:
        run(validate, "--strict", "-k", version, job, cwd=folder)
    import yaml

    config, service, made = yaml.safe_load_all(job.read_text())
    (folder / "plan").mkdir()
    for name, text in config["data"].items():
        (folder / "plan" / name).write_text(text)
    shutil.rmtree(folder / "profiles")
    shutil.rmtree(folder / "runs")
    script = made["spec"]["template"]["spec"]["containers"][0]["args"][0]
    script = script.replace("/plan/", f"{folder}/plan/")  # where a pod has it mounted
    name = service["metadata"]["name"]
    script = script.replace(f"{name}-0.{name}:29400", f"localhost:{free_port()}")  # what the cluster's DNS knows
    with ExitStack() as stack:
        pods = [
            stack.enter_context(
                running("bash", "-c", script, cwd=folder, log=folder / "pods.log", JOB_COMPLETION_INDEX=str(i))
            )
            for i in range(len(NODES))
        ]
        codes = [pod.wait(LIMIT_S) for pod in pods]
    assert codes == [0, 0], (codes, (folder / "pods.log").read_text()[-1500:])
    return f"valid for {VERSIONS[0]} to {VERSIONS[-1]}; pods' command in two shells: {result(folder)}"


ENGINES: dict[str, Callable[[Path], str]] = {
    "torchrun": torchrun,
    "slurm-script": slurm_script,
    "slurm": slurm,
    "ray": ray,
    "kubernetes": kubernetes,
}


def main(names: list[str]) -> int:
    """Run the engines named, or all of them; 1 where one failed."""
    unknown = sorted(set(names) - set(ENGINES))
    if unknown:
        print(f"no engine {', '.join(unknown)}; there are {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    rows, failed = [], 0
    for name in names or ENGINES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="engines-") as place:
            try:
                planned(Path(place))
                told = ("ok", ENGINES[name](Path(place)))
            except Missing as error:
                told = ("not here", str(error))
            except (AssertionError, OSError, subprocess.SubprocessError, StopIteration) as error:
                failed, told = 1, ("FAILED", str(error))
        rows.append((name, *told, time.monotonic() - began))
        print(f"{name}: {told[0]}", file=sys.stderr)
    for name, state, text, seconds in rows:
        print(f"{name:13} {state:9} {seconds:5.0f} s  {text}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
