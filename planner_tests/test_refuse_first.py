"""What cannot succeed is refused before anything is measured, and a cluster that is lacking is offered by name."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import nouns
import pytest
import torch
from refusals import refused, user_folder

import asa
from asa.api.plans import planned, planning, requests
from asa.cli import bench_setup, choose, comparison, entry, estimates
from asa.cli.commands import study_grid, study_runners, train
from asa.cli.commands.bench import VERBS
from asa.cli.console import Console
from asa.cli.settings import arguments
from asa.cost.machine import presets
from asa.errors import AsaError, UnavailableError, UsageError
from asa.ir import codec, shipped
from asa.launch.devices import cpu_name
from asa.profiler import interconnect, measure


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch):
    for module, name in ((measure, "profile_model"), (measure, "profile_module"), (interconnect, "measure_group")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("measured"))


@pytest.mark.parametrize(
    ("code", "words", "options"),
    [
        (2, "no strategy 'nosuch'", "--strategies nosuch"),
        (2, "nosuch", "--pin fc=nosuch@2"),
        (2, "asked for 200 devices, the largest cpu cluster known, box", "--gpus 200"),
        (2, "offload saves nothing", "--offload always"),
    ],
)
def test_plan_refuses_what_no_profile_would_change(code, words, options, tmp_path, monkeypatch, capsys):
    user_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(choose, "cuda_devices", lambda: 0)
    assert words in refused(capsys, code, "plan", "vgg11", *options.split())


def test_without_a_cluster_the_presets_that_are_large_enough_are_offered(tmp_path, monkeypatch, capsys):
    folder = user_folder(tmp_path, monkeypatch)
    for path in folder.glob("profiles/*"):
        path.unlink()
    said = refused(capsys, 5, "plan", "vgg11", "--gpus", "8")
    assert "no cluster of 8 cpu devices is known; run `asa cluster measure --gpus 8`" in said
    offered = said.split("presets that have 8: ")[1].rstrip(")").split(", ")
    assert offered
    assert all(presets.load(name).num_devices >= 8 for name in offered)


def test_a_file_that_cannot_be_written_is_found_out_first(tmp_path, monkeypatch, capsys):
    user_folder(tmp_path, monkeypatch)
    (tmp_path / "runs").write_text("in the way")
    assert "runs" in refused(capsys, 5, "plan", "vgg11")


def test_a_run_s_folder_is_tried_before_a_model_is_measured(tmp_path, monkeypatch, capsys):
    user_folder(tmp_path, monkeypatch)
    (tmp_path / "file").write_text("in the way")
    assert "choose another --out" in refused(capsys, 5, "train", "cnn", "--gpus", "2", "--out", "file/run")


def test_plans_from_python_are_refused_first_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, example = torch.nn.Linear(4, 2), torch.zeros(2, 4)
    with pytest.raises(UsageError, match="asked for 200 devices"):
        asa.plan(model, example, gpus=200)
    with pytest.raises(UsageError, match="nosuch"):
        asa.plan(model, example, gpus=2, strategies=["nosuch"])
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(UnavailableError, match="presets that have 8"):
        asa.plan(model, example, gpus=8)
    assert planning.known_clusters() == []


@pytest.mark.parametrize(
    ("words", "wishes"),
    [
        ("nosuch", {"strategies": ("nosuch",)}),
        ("nosuch", {"pins": ("a=nosuch@2",)}),
        ("has 2; lower", {"cluster": "a100-nvlink-2"}),
    ],
)
def test_ranks_of_a_users_own_program_measure_no_links_for_nothing(words, wishes, monkeypatch):
    def once(action):
        return action()

    place = SimpleNamespace(ranks=4, rank=0, device=torch.device("cpu"))
    place.votes = SimpleNamespace(once=once, tell=lambda value: value, everyone=lambda value: value)
    monkeypatch.setattr(planned, "_measured_cluster", lambda _: None)
    wanted = requests.PlanOptions(global_batch=8, optimizer="sgd", pipelines=False, **wishes)
    with pytest.raises(AsaError, match=words):
        planned.agreed_plan(place, torch.nn.Linear(4, 2), torch.zeros(2, 4), wanted)


def test_presets_that_are_asked_for_by_half_a_name_come_with_as_many_devices_first():
    with pytest.raises(UsageError, match="`asa cluster list` has a100-nvlink-8, "):
        presets.load("a100", 8)
    with pytest.raises(UsageError, match="`asa cluster list` has a100-nvlink-2, "):
        presets.load("a100", 2)
    assert presets.offered(10**6) == ""
    assert "a100-2x8-ib" in presets.offered(16, like="a100-nvlink-8")
    assert "h100" not in presets.offered(16, like="a100-nvlink-8")


def test_names_of_the_hub_are_offered_as_such(capsys):
    assert "did you mean hf:bert-base-uncased, bert?" in refused(capsys, 2, "plan", "bert-base-uncased")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("csv:empty.csv", "a header and samples are needed"),
        ("broken_data:data", "failed with RuntimeError: no"),
    ],
)
def test_data_is_read_before_a_model_is_measured(data, words, tmp_path, monkeypatch, capsys):
    user_folder(tmp_path, monkeypatch)
    (tmp_path / "empty.csv").write_text("pixel,class\n")
    (tmp_path / "broken_data.py").write_text("def data():\n    raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert words in refused(capsys, 3, "train", "logistic", "--gpus", "1", "--input", "1x8x8", "--data", data)


@pytest.mark.parametrize("command", [("train", "MODEL", "--gpus", "1"), ("bench", "--models", "MODEL", "--gpus", "1")])
def test_a_model_takes_the_rows_of_a_table_as_its_input(command, tmp_path, monkeypatch, capsys):
    user_folder(tmp_path, monkeypatch)
    rows = "".join(f"{n},{n % 7},{n % 2},{'ab'[n % 2]}\n" for n in range(400))
    (tmp_path / "table.csv").write_text("x,y,z,label\n" + rows)

    def asked(model, *more):
        words = [model if w == "MODEL" else w for w in command]
        return (*words, "--data", "csv:table.csv", *more)

    assert "rows of 3 numbers, which vgg16 cannot take" in refused(capsys, 2, *asked("vgg16"))
    assert "gives 3 numbers, the model takes samples of 1x8x8" in refused(
        capsys, 2, *asked("logistic", "--input", "1x8x8")
    )

    def settled(args, *_):
        raise UsageError(f"the input is {args.input}, classes {args.classes}")

    monkeypatch.setattr(bench_setup, "check_data", settled)
    assert "the input is (1, 1, 3), classes 2" in refused(capsys, 2, *asked("logistic"))


def test_a_launcher_with_another_number_of_ranks_is_refused_before_they_meet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_train", lambda *_: pytest.fail("ranks would have met"))
    codec.save(nouns.plan(), tmp_path / "plan.json")
    for name, value in {"RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)
    line = refused(capsys, 2, "train", "plan.json", "--data", "synthetic", "--out", "run")
    assert "the launcher started 7; use --nproc-per-node" in line


@pytest.mark.parametrize(
    "others", [{"LOCAL_WORLD_SIZE": "3"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"WORLD_SIZE": "many"}]
)
def test_ranks_that_may_continue_a_run_are_counted_when_they_have_met(others, tmp_path, monkeypatch):
    for name, value in ({"RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "7"} | others).items():
        monkeypatch.setenv(name, value)
    train._check_launched(nouns.plan(), tmp_path)


def test_a_model_whose_name_may_be_mistaken_says_what_it_reads(tmp_path, monkeypatch, capsys):
    folder = user_folder(tmp_path, monkeypatch)
    codec.save(nouns.profile(model="bert"), folder / "profiles" / "bert.json")
    assert entry.run(["plan", "bert", "--gpus", "2"]) == 0
    assert "reads the colours of an image as tokens; for text, take hf:bert-base-uncased" in capsys.readouterr().err
    assert "take gpt2, llama:8b or hf:NAME" in refused(capsys, 2, "plan", "bert", "--tokens", "64")


def test_times_of_another_torch_are_said_to_be_so(tmp_path, monkeypatch, capsys):
    folder = user_folder(tmp_path, monkeypatch)
    plain = nouns.profile()
    for used, warned in (("2.1.3+cpu", True), (torch.__version__, False)):
        old = replace(plain, provenance=replace(plain.provenance, torch_version=used))
        codec.save(old, folder / "profiles" / "tiny.json")
        assert entry.run(["plan", "--gpus", "2"]) == 0
        said = capsys.readouterr().err
        assert ("times of tiny are of torch 2.1.3, installed is " in said) == warned
        assert ("`asa profile tiny` measures them anew" in said) == warned


@pytest.mark.parametrize(
    ("age_s", "ratio", "anew"), [(0, 3.0, False), (7200, 1.1, False), (7200, 3.0, True), (7200, 0.3, True)]
)
def test_an_old_profile_is_used_where_this_machine_is_as_fast_as_then(age_s, ratio, anew, monkeypatch, capsys):
    plain, created = nouns.profile(), datetime.now(UTC) - timedelta(seconds=age_s)
    old = replace(plain, provenance=replace(plain.provenance, created=created.isoformat()))
    if anew and ratio < 1:  # a file by hand need not say when
        old = replace(plain, provenance=replace(plain.provenance, created="yesterday"))
    monkeypatch.setattr(choose, "stored_local_profile", lambda *_: (old, "profile old.json"))
    monkeypatch.setattr(choose, "measured", lambda *_, **__: (plain, "measured now"))
    monkeypatch.setattr(measure, "slowdown", lambda _: ratio)
    console = Console()
    _, source = choose.local_profile(arguments(VERBS[-1], (), {}), console, "tiny", "cpu", 2)
    assert source == ("measured now" if anew else "profile old.json")
    assert ("times as long here now, so tiny is profiled anew" in capsys.readouterr().err) == anew


def test_times_of_another_processor_are_said_to_be_so(tmp_path, monkeypatch, capsys):
    folder = user_folder(tmp_path, monkeypatch)
    plain = nouns.profile()
    here = replace(plain.device, name=cpu_name())
    for device, words, warned in (
        (plain.device, (), True),
        (plain.device, ("--cluster", "box"), False),
        (here, (), False),
    ):
        codec.save(replace(plain, device=device), folder / "profiles" / "tiny.json")
        assert entry.run(["plan", "--gpus", "2", *words]) == 0
        said = " ".join(capsys.readouterr().err.split())
        line = f"times are of {plain.device.name}, this machine has {cpu_name()}; `asa profile tiny` measures them here"
        assert (line in said) == warned


def test_a_model_that_was_compiled_as_one_is_no_basis_for_plans_of_several_devices(tmp_path, monkeypatch):
    folder, plain = user_folder(tmp_path, monkeypatch), nouns.profile()
    codec.save(replace(plain, compiled="whole"), folder / "profiles" / "tiny.json")
    monkeypatch.setattr(choose, "local_device", lambda _: plain.device)
    monkeypatch.setattr("asa.zoo.models.default_input", lambda *_: (plain.graph.input_shape, plain.graph.num_classes))
    monkeypatch.setattr(estimates, "estimated", lambda *_: (plain, "estimated"))
    args, console = arguments(VERBS[-1], ("--study", "grid", "--models", "tiny"), {}), Console()
    for gpus in (1, 2):
        (block,) = study_grid.define(args, most=gpus, cluster_gpus=None).blocks
        here = choose.stored_local_profile(args, console, "tiny", "cpu", gpus)
        predicted = study_runners._profile_for(block, args, console, replace(nouns.cluster(2), device=plain.device))
        assert (here is not None, predicted[1] != "estimated") == (gpus == 1, gpus == 1)
    monkeypatch.setattr(comparison, "_plan", lambda args, contest, gpus, strategy: [nouns.plan()])
    for compiled, ranks in (("whole", []), ("none", [2])):
        contest = comparison.ModelBench(
            model="tiny",
            profile=replace(plain, compiled=compiled),
            cluster=nouns.cluster(2),
            plans={"asa": nouns.plan()},
        )
        assert [point.ranks for point in comparison._scaling(args, contest, 1)] == ranks
    with pytest.raises(UsageError, match="compiled as one runs on one device, asked for 2"):
        asa.plan(replace(plain, compiled="whole"), gpus=2, cluster=nouns.cluster(2))
