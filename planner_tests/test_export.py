"""What ``asa export`` writes is what other tools read: weights to the bit, snippets that run or parse."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import nouns
import pytest
import test_checkpoint
import torch
import torch.distributed as dist
import training

from asa.cli import entry
from asa.errors import UsageError
from asa.executor.running import outdir
from asa.executor.running.export import export_weights, plain_state
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.ir import codec
from asa.ir.plan import Baseline, DataDegree, Plan, Stage, TensorDegree
from asa.launch import run_ranks
from asa.report.snippets import TOOLS
from asa.report.snippets.uniform_choice import choose, name_of
from asa.scheduler import adapt
from asa.strategies import offered
from asa.zoo.models import build


@pytest.mark.parametrize("split", [(), ("classifier", "features.1.conv")])
def test_exported_weights_are_those_of_the_checkpoint_and_load_strictly(
    tmp_path: Path, split: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/train/cnn")
    train(training.plan(ranks=2, split=split), training.settings(run, epochs=1), strategies=offered(), adapt=adapt)
    codec.save(training.plan(ranks=2, split=split), Path("runs/train/later/plan.json"))  # a run that saved nothing
    assert entry.run(["export", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["to"]) == (6, "safetensors")
    file = Path(document["file"])
    assert file == run / "cnn.safetensors"
    from safetensors.torch import load_file

    model = build("cnn", num_classes=10, input_shape=(1, 8, 8), seed=99)
    model.load_state_dict(load_file(file), strict=True)
    stored = checkpoint.read(checkpoint.find(run / outdir.CHECKPOINTS).path, checkpoint.MODEL)
    state = model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[n], stored[n]) for n in stored)
    assert entry.run(["export", "--step", "5"]) == 7
    assert "there is step_00000006" in capsys.readouterr().err
    other = tmp_path / "other.json"
    codec.save(training.plan(ranks=3), other)
    assert entry.run(["export", str(other)]) == 7
    file.unlink()
    (run / "plan.json").write_text("{")  # nothing of it is needed
    assert entry.run(["export", "--run", str(run)]) == 0
    assert file.is_file()
    found = checkpoint.find(run / outdir.CHECKPOINTS)
    finds = iter((replace(found, path=run / "removed"), found))  # a run at work removes old checkpoints
    monkeypatch.setattr("asa.executor.running.export._find", lambda *_: next(finds))
    assert export_weights(run, tmp_path / "again.safetensors").step == 6


IDLE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.idle = nn.Parameter(torch.randn(3))
        self.alike = self.idle

def make():
    return Net()
"""


def test_weights_that_no_forward_reads_are_exported_as_they_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    Path("idle_weights.py").write_text(IDLE)
    plan = replace(training.plan("logistic"), model_spec="idle_weights:make")
    model = build(plan.model_spec, num_classes=10, input_shape=(1, 8, 8), seed=3)
    stored = {n: t + 1 for n, t in model.state_dict().items() if n.startswith("1.")}
    manifest = replace(test_checkpoint._manifest(5), plan=plan, model_spec=plan.model_spec, seed=3)
    tensors = {checkpoint.MODEL: stored, checkpoint.OPTIMIZER: {}}
    checkpoint.write(tmp_path / outdir.CHECKPOINTS, manifest, tensors, commit=lambda: None)
    export_weights(tmp_path, Path("weights.safetensors"))
    exported = load_file("weights.safetensors")
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[n], stored.get(n, t)) for n, t in model.state_dict().items())


def test_a_torchvision_model_takes_every_name(tmp_path: Path) -> None:
    """Tied or not, with buffers or without: names and shapes are torchvision's own."""
    import torchvision

    for name in ("resnet18", "mobilenet_v3_small"):
        model = torchvision.models.get_model(name, weights=None, num_classes=7)
        stored = {n: t.clone() for n, t in model.state_dict().items()}
        again = torchvision.models.get_model(name, weights=None, num_classes=7)
        again.load_state_dict(plain_state(model, stored), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), stored.values(), strict=True))


def test_tied_weights_come_under_both_names() -> None:
    first = torch.nn.Linear(3, 3, bias=False)
    model = torch.nn.Sequential(first, torch.nn.Linear(3, 3, bias=False))
    model[1].weight = first.weight
    found = plain_state(model, {"0.weight": torch.eye(3)})
    assert found.keys() == {"0.weight", "1.weight"}
    assert found["0.weight"].data_ptr() != found["1.weight"].data_ptr()


def test_a_flipped_bit_is_not_exported(tmp_path: Path) -> None:
    from asa.errors import InvalidInputError, NoCheckpointError

    train(training.plan(), training.settings(tmp_path, epochs=1), strategies=offered(), adapt=adapt)
    file = checkpoint.find(tmp_path / outdir.CHECKPOINTS).path / checkpoint.MODEL
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(NoCheckpointError, match="SHA-256"):
        export_weights(tmp_path, tmp_path / "out.safetensors")
    with pytest.raises(InvalidInputError, match="SHA-256"):
        export_weights(tmp_path, tmp_path / "out.safetensors", step=6)
    assert not (tmp_path / "out.safetensors").exists()


def resnet(strategy: str, ranks: int = 2, data: str = "replicate", tensor: int = 1, **changes: Any) -> Plan:
    """ResNet-18 under a whole strategy, components named as its blocks."""
    names = ["stem", *(f"layer{i}.{j}" for i in range(1, 5) for j in range(2)), "classifier"]
    base = nouns.plan()
    degree = 1 if tensor > 1 else ranks
    components = tuple(
        replace(
            base.components[0], name=n, stage=0, checkpoint=False, data=DataDegree(strategy=data, degree=degree),  # type: ignore[arg-type]
            tensor=TensorDegree(strategy="tensor" if tensor > 1 else "none", degree=tensor),
        )
        for n in names
    )  # fmt: skip
    plan = replace(
        base, model_spec="resnet18", input_shape=(3, 32, 32), num_classes=10, strategy=strategy, gpus=ranks,
        global_batch=8, precision="fp32", optimizer="sgd", device_type="cpu", components=components,
        stages=(Stage(ranks=tuple(range(ranks))),), schedule="none", num_microbatches=2,
        prediction=replace(base.prediction, memory_bytes_per_rank=(1,) * ranks), baselines=(),
    )  # fmt: skip
    return replace(plan, **changes)


def staged() -> Plan:
    """1F1B over two ranks, cut in front of layer3."""
    plan = resnet("1f1b")
    components = tuple(
        replace(c, stage=int(i >= 5), data=DataDegree(strategy="replicate", degree=1))
        for i, c in enumerate(plan.components)
    )
    return replace(plan, components=components, stages=(Stage(ranks=(0,)), Stage(ranks=(1,))), schedule="1f1b")


WHOLE = {
    "ddp": resnet("ddp"),
    "zero1": resnet("zero1", data="zero1"),
    "zero2": resnet("zero2", data="zero2"),
    "fsdp": resnet("fsdp", data="zero3"),
    "tensor": resnet("tensor", tensor=2),
    "1f1b": staged(),
}


def snippet(tool: str, plan: Plan) -> str:
    t = TOOLS[tool]
    return t.write(plan, choose(plan, t.able, tool, recompute=t.recompute, grids=t.grids))


def _execute(_rank: int, script: str) -> str:
    """What the script prints, run as torchrun would in a process that has torch already."""
    dist.destroy_process_group()
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "STEPS": "2"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "1f1b"])
def test_the_torch_script_runs_on_two_ranks(name: str) -> None:
    plan = WHOLE[name]
    if name == "1f1b":  # fewer microbatches than stages
        plan = replace(plan, num_microbatches=1)
    if name == "ddp":  # recomputing too
        components = tuple(replace(c, checkpoint=i == 1) for i, c in enumerate(plan.components))
        plan = replace(plan, components=components)
    said = "".join(run_ranks(2, _execute, snippet("torch", plan), threads=1, timeout_s=120))
    losses = [float(x.split("loss ")[1]) for x in said.splitlines() if x.startswith("step")]
    assert len(losses) == 2
    assert all(0 < x < 10 for x in losses)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", WHOLE)
def test_every_tool_makes_something_readable_of_every_whole_strategy(tool: str, name: str) -> None:
    plan = replace(WHOLE[name], baselines=(Baseline(name="ddp", step_time_s=2.0, memory_bytes_max=1, fits=True),))
    assert name_of(plan) == name
    t = TOOLS[tool]
    text = snippet(tool, plan)
    # Neither torchtitan nor Megatron-LM trains a ResNet.
    assert ("NOT EXPRESSED" in text) is (name not in t.able or name == "tensor" or tool in ("torchtitan", "megatron"))
    if tool == "torchtitan":
        ast.parse(text)
        degrees = sorted(int(v) for v in re.findall(r"_degree=(\d+)", text))
        assert degrees == [1, 1, 1, 2]
    elif tool == "megatron":
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        assert ("--tensor-model-parallel-size 2" in text) is (name == "tensor")
        assert ("--use-distributed-optimizer" in text) is (name in ("zero1", "zero2", "fsdp"))
    elif tool == "accelerate":
        ast.parse(text)
        assert "--nproc-per-node 2" in text
        assert ("dp_shard_size=2" in text) is (name in ("fsdp", "zero2"))
        assert ("DeepSpeedPlugin(zero_stage=1" in text) is (name == "zero1")
    else:
        tree = ast.parse(text)
        if tool == "deepspeed":
            config = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}["CONFIG"]
            made = ast.literal_eval(config)
            assert made["train_batch_size"] == 8
            assert made["zero_optimization"]["stage"] == {"zero1": 1, "zero2": 2, "fsdp": 3}.get(name, 0)


def test_a_mixture_is_not_passed_off_as_the_plan() -> None:
    plan = resnet("asa")
    last = replace(
        plan.components[-1],
        data=DataDegree(strategy="replicate", degree=1),
        tensor=TensorDegree(strategy="tensor", degree=2),
    )
    mixed = replace(plan, components=(*plan.components[:-1], last))
    assert name_of(mixed) is None
    with pytest.raises(UsageError, match="cannot run this plan"):
        choose(mixed, ("ddp",), "tool", recompute="none")
    seconds = plan.prediction.step_time_s
    baselines = tuple(
        Baseline(name=n, step_time_s=s * seconds, memory_bytes_max=1, fits=f)
        for n, s, f in (("ddp", 1.5, True), ("fsdp", 1.2, False), ("zero1", 1.7, True))
    )
    found = choose(replace(mixed, baselines=baselines), ("ddp", "fsdp", "zero1"), "tool", recompute="none")
    assert found.name == "ddp"
    assert "a layout per component (replicate x2, replicate x1 with tensors x2)" in found.notes[0]
    assert "+50.0 %" in found.notes[0]


def test_the_command_prints_the_snippet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codec.save(WHOLE["ddp"], Path("plan.json"))
    assert entry.run(["export", "plan.json", "--to", "fabric"]) == 0
    said = capsys.readouterr()
    assert "DDPStrategy" in said.out
    ast.parse(said.out)
    assert entry.run(["export", "plan.json", "--to", "deepspeed", "-o", "ds.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True
    assert "deepspeed.initialize" in Path("ds.py").read_text()


def test_what_a_snippet_leaves_out_is_said_in_the_document_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ddp = WHOLE["ddp"]
    offloaded = tuple(replace(c, offload=True) for c in ddp.components)
    cases = [
        ("torch", replace(ddp, compression="bf16"), "the plan as bf16"),
        ("torch", replace(ddp, components=offloaded), "on the host"),
        ("torch", replace(WHOLE["1f1b"], precision="bf16"), "this is fp32"),
        ("torch", replace(WHOLE["1f1b"], global_batch=9), "8 samples a step"),
        ("fabric", replace(ddp, global_batch=7), "4 samples a step"),
        ("deepspeed", replace(ddp, global_batch=7), "4 samples a step"),
        ("accelerate", replace(ddp, global_batch=3), "4 samples a step"),
        ("torchtitan", replace(ddp, precision="fp16"), "no fp16"),
        ("torch", replace(WHOLE["1f1b"], num_microbatches=1), "this is GPipe"),
        ("torchtitan", replace(WHOLE["1f1b"], num_microbatches=1), "this is GPipe"),
    ]
    for tool, plan, said in cases:
        codec.save(plan, Path("plan.json"))
        assert entry.run(["export", "plan.json", "--to", tool, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["exact"] is False, (tool, said)
        assert any(said in note for note in document["not_expressed"]), (said, document["not_expressed"])
        assert all(f"NOT EXPRESSED: {note}." in document["text"] for note in document["not_expressed"])
    codec.save(replace(ddp, global_batch=7), Path("plan.json"))
    assert entry.run(["export", "plan.json", "--to", "torch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True  # rows decide what ranks count for


def test_a_single_device_in_a_plans_stead_is_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = resnet("asa")
    first = replace(plan.components[0], data=DataDegree(strategy="zero1", degree=2))
    single = Baseline(name="single", step_time_s=1.0, memory_bytes_max=1, fits=True)
    codec.save(replace(plan, components=(first, *plan.components[1:]), baselines=(single,)), Path("plan.json"))
    wanted = {
        "torch": "RANKS, GLOBAL_BATCH, MICROBATCHES, STEPS = 1, 8, 1,",
        "fabric": "devices=1",
        "deepspeed": '"train_batch_size": 8',
        "accelerate": "RANKS, MICROBATCHES, STEPS = 1, 1,",
    }
    for tool, line in wanted.items():
        assert entry.run(["export", "plan.json", "--to", tool]) == 0
        said = capsys.readouterr().out
        assert line in said
        assert "as single on 1 rank," in said


def test_uneven_rows_count_as_in_the_plan_and_maps_have_a_loss() -> None:
    """Of five rows one part has two and the other three: the mean over all rows, whoever has them."""
    shares = "loss_of(net(inputs), labels) * (len(labels) * RANKS / GLOBAL_BATCH)"
    maps = {"model_spec": "unet", "input_shape": (1, 32, 32), "num_classes": 4, "global_batch": 5}
    assert shares in snippet("torch", resnet("ddp", **maps))
    said = "".join(
        run_ranks(1, _execute, snippet("torch", resnet("single", ranks=1, **maps)), threads=1, timeout_s=120)
    )
    losses = [float(x.split("loss ")[1]) for x in said.splitlines() if x.startswith("step")]
    assert len(losses) == 2
    assert all(0 < x < 10 for x in losses)


@pytest.mark.parametrize(
    ("spec", "shape"), [("googlenet", (3, 32, 32)), ("fcn_resnet50", (3, 32, 32)), ("maxvit_t", (3, 224, 224))]
)
def test_the_model_and_loss_of_a_script_are_those_of_the_plan(spec: str, shape: tuple[int, int, int]) -> None:
    from asa.report.snippets.pieces import loss_lines, model_lines

    plan = replace(resnet("ddp"), model_spec=spec, input_shape=shape, num_classes=4)
    known: dict[str, Any] = {}
    (needs, expression), (loss_needs, loss) = model_lines(plan), loss_lines(plan)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        exec(f"{needs}\n{loss_needs}\nmodel = {expression}\nloss = {loss}", known)
    own = build(spec, num_classes=4, input_shape=shape).state_dict() if spec != "maxvit_t" else None
    assert own is None or own.keys() == known["model"].state_dict().keys()
    value = known["loss"](known["model"](torch.zeros(2, *shape, device="meta")), torch.zeros(2, device="meta").long())
    assert value.shape == ()


def test_a_snippet_of_a_model_of_tokens_feeds_it_tokens() -> None:
    maps = {"model_spec": "gpt2:tiny", "input_shape": (16,), "num_classes": 64}
    for tool in ("torch", "accelerate", "fabric", "deepspeed"):
        text = snippet(tool, resnet("ddp", **maps))
        ast.parse(text)
        assert "randn" not in text
        assert "input_shape=(16,)" in text
    said = "".join(
        run_ranks(1, _execute, snippet("torch", resnet("single", ranks=1, **maps)), threads=1, timeout_s=120)
    )
    assert [x for x in said.splitlines() if x.startswith("step")]


def llama(strategy: str, data: int, tensor: int, stages: int, kept: str = "replicate") -> Plan:
    """Llama-8B on a grid of ranks: its two ends, and blocks that stages cut after the first."""
    names = ["embedding", *(f"blocks.{i}" for i in range(32)), "head"]
    width = data * tensor
    base = resnet(strategy)
    components = tuple(
        replace(
            base.components[0], name=n, stage=min(i // 2, stages - 1), checkpoint=i in (2, 3, 4),
            data=DataDegree(strategy=kept, degree=data),  # type: ignore[arg-type]
            tensor=TensorDegree(strategy="tensor" if tensor > 1 else "none", degree=tensor),
        )
        for i, n in enumerate(names)
    )  # fmt: skip
    ranks = width * stages
    cut = tuple(Stage(ranks=tuple(range(s * width, (s + 1) * width))) for s in range(stages))
    return replace(
        base, model_spec="llama:8b", input_shape=(4096,), num_classes=128_256, gpus=ranks, global_batch=32,
        components=components, stages=cut, schedule="1f1b" if stages > 1 else "none", num_microbatches=4,
        precision="bf16", optimizer="adamw",
        prediction=replace(base.prediction, memory_bytes_per_rank=(1,) * ranks),
    )  # fmt: skip


def test_a_grid_of_ranks_is_what_the_tools_of_language_models_run() -> None:
    plan = llama("hybrid:d2t2p2", 2, 2, 2)
    titan = snippet("torchtitan", plan)
    ast.parse(titan)
    for line in (
        "data_parallel_shard_degree=1", "tensor_parallel_degree=2", "pipeline_parallel_degree=2",
        "pipeline_parallel_microbatch_size=4", " local_batch_size=16", "global_batch_size=32", "seq_len=4096",
        '["tok_embeddings", "layers.0"]', '"layers.31", "norm", "lm_head"',
        "module_fqns_per_model_part=[", "data_parallel_replicate_degree=2", "config = llama3_8b()",
    ):  # fmt: skip
        assert line in titan
    flags = snippet("megatron", plan)
    for flag in (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "'Et|t*31L'", "--overlap-grad-reduce",
        "--micro-batch-size 4 --global-batch-size 32", "--num-layers 32 --hidden-size 4096", "--num-query-groups 8",
        "--recompute-num-layers 3", "--bf16", "--nproc-per-node 8 --nnodes 1",
    ):  # fmt: skip
        assert flag in flags
    assert "use-distributed-optimizer" not in flags
    sharded = snippet("megatron", llama("asa", 4, 2, 1, "zero3"))
    assert "--data-parallel-sharding-strategy optim_grads_params" in sharded
    assert "ParallelismConfig(dp_shard_size=4, tp_size=2)" in snippet("accelerate", llama("asa", 4, 2, 1, "zero3"))
    assert "data_parallel_size=4, tensor_parallel_size=2" in snippet("fabric", llama("asa", 4, 2, 1, "zero3"))
    other = DataDegree(strategy="replicate", degree=4), TensorDegree(strategy="none", degree=1)
    mixed = replace(plan.components[5], data=other[0], tensor=other[1])
    components = tuple(mixed if c.name == mixed.name else c for c in plan.components)
    with pytest.raises(UsageError, match="cannot run this plan"):
        snippet("megatron", replace(plan, strategy="asa", components=components))


def exported(
    plan: Plan, tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The document of ``asa export`` of a plan."""
    monkeypatch.chdir(tmp_path)
    codec.save(plan, Path("plan.json"))
    assert entry.run(["export", "plan.json", "--to", tool, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_strategy_in_a_plans_stead_is_the_one_that_was_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All devices, the microbatches of the baseline, and nothing recomputed; whatever the plan does."""
    plan = resnet("asa", ranks=2, gpus=4, num_microbatches=8)
    components = tuple(
        replace(c, checkpoint=True, data=DataDegree(strategy="zero1" if i else "replicate", degree=2))
        for i, c in enumerate(plan.components)
    )
    ddp = Baseline(name="ddp", step_time_s=1.0, memory_bytes_max=1, fits=True, num_microbatches=2)
    mixed = replace(plan, components=components, global_batch=32, baselines=(ddp,))
    text = exported(mixed, "torch", monkeypatch, tmp_path, capsys)["text"]
    assert "RANKS, GLOBAL_BATCH, MICROBATCHES, STEPS = 4, 32, 2," in text
    assert "RECOMPUTED" not in text
    assert "recomputes" not in text
    engine = exported(mixed, "deepspeed", monkeypatch, tmp_path, capsys)["text"]
    for line in ('"train_micro_batch_size_per_gpu": 4', '"gradient_accumulation_steps": 2', '"train_batch_size": 32'):
        assert line in engine


def test_shards_that_a_plan_does_not_tell_are_not_guessed() -> None:
    """Of HSDP as a baseline nothing says over how many ranks a copy is sharded."""
    plan = resnet("asa", ranks=4)
    first = replace(plan.components[0], data=DataDegree(strategy="zero1", degree=4))
    times = {"hsdp": 1.0, "ddp": 2.0}
    known = {n: Baseline(name=n, step_time_s=s, memory_bytes_max=1, fits=True) for n, s in times.items()}
    mixed = replace(plan, components=(first, *plan.components[1:]), baselines=tuple(known.values()))
    for tool in ("accelerate", "torchtitan", "megatron"):
        t = TOOLS[tool]
        assert choose(mixed, t.able, tool, recompute=t.recompute, grids=t.grids).name == "ddp"
        with pytest.raises(UsageError, match="none of the baselines it could run fits"):
            snippet(tool, replace(mixed, baselines=(known["hsdp"],)))


def test_an_engine_whose_weights_are_in_half_precision_reads_such_images() -> None:
    for precision, cast in (("bf16", ".bfloat16()"), ("fp16", ".half()")):
        text = snippet("deepspeed", replace(WHOLE["zero2"], precision=precision))
        assert f"device=engine.device){cast}\n" in text
        assert f"DeepSpeed holds weights in {precision}" in text
        other = snippet("accelerate", replace(WHOLE["zero1"], precision=precision))
        assert f"device=accelerator.device){cast}\n" in other
        assert cast not in snippet("accelerate", replace(WHOLE["ddp"], precision=precision))
    assert ".bfloat16()" not in snippet("deepspeed", WHOLE["zero2"])
    tokens = {"model_spec": "gpt2:tiny", "input_shape": (16,), "num_classes": 64, "precision": "bf16"}
    assert ".bfloat16()" not in snippet("deepspeed", resnet("ddp", **tokens))


def every_block(plan: Plan) -> Plan:
    """``plan``, with every component recomputed."""
    return replace(plan, components=tuple(replace(c, checkpoint=True) for c in plan.components))


def test_what_frameworks_of_language_models_do_not_compute_alike_is_said() -> None:
    alone = llama("tensor", 1, 8, 1)
    assert "NOT EXPRESSED" not in snippet("torchtitan", every_block(alone))
    assert "has no SGD: this is AdamW" in snippet("torchtitan", replace(alone, optimizer="sgd"))
    own = snippet("torchtitan", replace(alone, model_spec="llama:405b"))
    assert "llama3_405b()" not in own, "torchtitan's own configuration computes in float8, not as planned"
    assert "Megatron-LM holds weights in bf16" in snippet("megatron", alone)
    sharded = replace(llama("zero1", 8, 1, 1, "zero1"), optimizer="sgd")
    assert "shards the state of Adam alone: take AdamW for zero1" in snippet("megatron", sharded)
    assert "Adam alone" not in snippet("megatron", replace(sharded, optimizer="adamw"))


def test_scripts_for_several_machines_are_started_on_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {
        "torch": "# on each of 2 machines: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d",
        "accelerate": "# on each of 2 machines: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d",
        "fabric": "devices=8, num_nodes=2,",
        "deepspeed": "deepspeed --hostfile HOSTS --num_nodes 2 --num_gpus 8 FILE",
        "torchtitan": "--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST:29400 -m torchtitan.train",
        "megatron": '--nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400"',
    }
    plan = resnet("ddp", ranks=16, global_batch=64)
    for tool, line in wanted.items():
        assert line in exported(plan, tool, monkeypatch, tmp_path, capsys)["text"], tool
    one = exported(resnet("ddp", ranks=8, global_batch=64), "torch", monkeypatch, tmp_path, capsys)["text"]
    assert "torchrun --standalone --nproc-per-node 8 FILE" in one


def _losses(command: list[str], *, package: str) -> list[float]:
    where = {**os.environ, "STEPS": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=240, check=False)
    losses = [float(x.split("loss ")[1]) for x in done.stdout.splitlines() if x.startswith("step")]
    assert len(losses) == 2, f"{package}: {done.stderr}"
    return losses


def _alone(data: int) -> list[float]:
    """Losses of the last microbatch of two steps of the same training on one device."""
    torch.manual_seed(0)
    model = build("logistic", num_classes=10, input_shape=(3, 8, 8), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    found = []
    for step in range(2):
        for part in range(2):
            losses = []
            for rank in range(data):
                torch.manual_seed((step * 2 + part) * data + rank)
                x, y = torch.randn(4 // data, 3, 8, 8), torch.randint(10, (4 // data,))
                losses.append(torch.nn.functional.cross_entropy(model(x), y))
            loss = torch.stack(losses).mean()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("tool", "name"),
    [("accelerate", "ddp"), ("accelerate", "fsdp"), ("fabric", "ddp"), ("fabric", "fsdp"), ("fabric", "tensor")],
)
def test_two_ranks_train_to_the_loss_of_one_device(tmp_path: Path, tool: str, name: str) -> None:
    package = "accelerate" if tool == "accelerate" else "lightning_fabric"
    pytest.importorskip(package, reason=f"{package} is not installed: its script is not run")
    plan = resnet(
        name, model_spec="logistic", input_shape=(3, 8, 8), num_classes=10,
        data={"fsdp": "zero3"}.get(name, "replicate"), tensor=2 if name == "tensor" else 1,
    )  # fmt: skip
    plan = replace(plan, components=(replace(plan.components[0], name="classifier"),))
    file = tmp_path / "script.py"
    text = snippet(tool, plan)
    if tool == "fabric" and importlib.util.find_spec("lightning") is None:
        text = text.replace("lightning.fabric", "lightning_fabric")  # the same package by itself
    file.write_text(text)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if tool == "accelerate" else []
    assert _losses([sys.executable, *ranks, str(file)], package=package) == pytest.approx(
        _alone(1 if name == "tensor" else 2), abs=2e-6
    )


def test_accelerate_says_how_it_is_started(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    file = tmp_path / "script.py"
    file.write_text(snippet("accelerate", resnet("ddp", model_spec="logistic", input_shape=(3, 8, 8), num_classes=10)))
    alone = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=240, check=False)
    assert alone.returncode != 0
    assert "torchrun" in alone.stderr
