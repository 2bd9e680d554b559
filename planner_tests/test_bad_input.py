"""What people get wrong on the command line: one line with the number that decides and the remedy, the documented exit
code."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import nouns
import pytest
from refusals import refused, user_folder

from asa.cli import entry, places
from asa.cli.commands import train
from asa.cli.settings import arguments
from asa.ir import codec
from asa.ir.plan import Stage

MANY = str(10**9)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    return user_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan", "--memory", "1e305"), "above 1048576"),
        (("plan", "--memory", "inf"), "--memory"),
        (("plan", "--gpus", MANY), "asked for 1000000000 devices, the largest cpu cluster known, box, has 2"),
        (("plan", "--gpus", "-1"), "-1 is below 1"),
        (("plan", "--global-batch", "0"), "0 is below 1"),
        (("plan", "--pin", "head=tensor@2", "--pin", "he*=none@1"), "contradict each other on component head"),
        (("plan", "nowhere.json", "--verify", "1"), "--verify: 1 is below 2, the fewest that can be compared"),
        (("train", "--seed", "99999999999"), "above 4294967295"),
        (("cluster", "measure", "--gpus", MANY), "asked for 1000000000 ranks"),
        (("bench", "--models", "cnn", "--device", "cpu", "--gpus", MANY), "asked for 1000000000 ranks"),
    ],
)
def test_impossible_numbers_are_usage_errors(argv, words, capsys):
    assert words in refused(capsys, 2, *argv)


def test_a_comparison_without_a_model_takes_that_of_the_newest_profile(capsys, monkeypatch):
    compared: list[tuple[str, ...]] = []
    monkeypatch.setattr("asa.cli.bench_setup.check", lambda args, *_: compared.append(args.models))
    monkeypatch.setattr("asa.cli.commands.bench._compare", lambda *_: None)
    monkeypatch.setattr("asa.cli.options.check_model", lambda *_: None)
    assert entry.run(("bench", "--device", "cpu", "--gpus", "1")) == 0
    assert "asa: --models: tiny, that of the newest profile profiles/tiny.json" in capsys.readouterr().err
    Path("profiles/tiny.json").rename("source.json")
    assert entry.run(("bench", "--device", "cpu", "--gpus", "1")) == 0
    assert compared == [("tiny",), ("resnet50",)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_device_that_is_full_is_named(capsys):
    assert "/dev/full: No space left on device" in refused(capsys, 5, "plan", "tiny", "--gpus", "2", "-o", "/dev/full")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--device", "emulated:gpu.json"), "--check-sealed measures, an emulated device sleeps"),
        (("--models", "cnn"), "no sealed prediction is of --models cnn; they are of resnet50, vit_b_16"),
    ],
)
def test_sealed_predictions_are_run_as_they_are_or_not_at_all(argv, words, capsys, monkeypatch):
    monkeypatch.setattr("asa.cli.bench_setup.device_of", lambda *_: pytest.fail("looked at devices"))
    sealed = Path(__file__).resolve().parent.parent / "benchmarks" / "sealed"
    assert words in refused(capsys, 2, "bench", "--check-sealed", "--sealed", str(sealed), *argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("plan --budget 5s", "--budget has no effect without --verify; add that, or leave out --budget"),
        ("plan --epoch-samples 5", "--epoch-samples has no effect without --price; add that"),
        ("train --rehearsal-steps 5", "--rehearsal-steps has no effect without --rehearse"),
        ("bench --sealed there", "--sealed has no effect without --check-sealed"),
        ("plan --from-run run --input 3x64x64", "--input has no effect with --from-run; leave out --input"),
        ("plan --precision bf16 --from-run run", "--precision has no effect with --from-run"),
        ("bench --check-sealed --out there", "--out has no effect with --check-sealed; leave out --out"),
        ("bench --check-sealed --global-batch 64", "leave out --global-batch"),
        ("export --to torch --step 3", "--step has no effect with --to torch, only with --to safetensors"),
        ("export --to torch --run there", "leave out --run"),
        ("export plan.json --run there", "PLAN has no effect with --run; leave out PLAN"),
        ("launch slurm --volume data", "--volume has no effect with slurm, only with k8s"),
        ("launch ray --image mine", "--image has no effect with ray, only with slurm or k8s"),
        ("launch k8s --partition gpu", "--partition has no effect with k8s, only with slurm"),
        ("launch slurm --gpus-per-node 2 --cluster box", "--cluster has no effect with --gpus-per-node"),
        ("launch slurm --train=--rehearse=0", "--rehearse runs one rank by itself, a job trains"),
    ],
)
def test_options_that_would_do_nothing_are_refused(argv, words, capsys):
    assert words in refused(capsys, 2, *argv.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--rehearse 0 --epochs 2", "--epochs has no effect with --rehearse"),
        ("--rehearse 1 --out there", "--out has no effect with --rehearse"),
        ("--data digits --data-root there", "no effect with --data digits, only with --data cifar100 or cifar10"),
        ("--data synthetic --download", "--download has no effect with --data synthetic"),
    ],
)
def test_options_that_do_nothing_and_no_harm_are_named(argv, words, caplog):
    assert arguments(train.VERBS[0], argv.split(), {}).origin
    assert words in caplog.text


def test_a_setting_for_many_commands_may_do_nothing_in_one(place, capsys, monkeypatch):
    (place / "asa.toml").write_text('[plan]\nbudget = "5s"\n')
    monkeypatch.setenv("ASA_EPOCH_SAMPLES", "100")
    assert entry.run(["plan", "--time-limit", "0.1s"]) == 0


BENCH = ("bench", "--device", "cpu", "--gpus", "2", "--models", "cnn", "--cluster", "box")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--strategies", "ddp,dpp"), 2, "no strategy 'dpp'"),
        (("--models", "cnn,resnet5O"), 2, "resnet50"),
        (("--classes", "10"), 2, "cifar100 has 100 classes, the model has 10; make a model of 100"),
        (("--global-batch", MANY), 2, "larger than the 5000"),
        (("--cluster", "a100-nvlink-8"), 2, "8 cuda devices, this command runs on 2 of cpu"),
        (("--cluster", "box", "--gpus", "3"), 2, "box has 2 cpu devices"),
        (("--data-root", "nowhere"), 3, "nowhere"),
        (("--data-root", "torn"), 3, "torn: train.bin is truncated: 3073 bytes"),
        (("--out", "file"), 5, "file is not a directory; choose another --out"),
    ],
)
def test_a_comparison_is_refused_before_anything_is_measured(argv, code, words, place, capsys, monkeypatch):
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured something")

    monkeypatch.setattr("asa.cli.choose.local_profile", measured)
    monkeypatch.setattr("asa.profiler.interconnect.measure_cluster", measured)
    (place / "file").write_text("")
    (place / "torn").mkdir()
    for name in ("train.bin", "test.bin"):
        (place / "torn" / name).write_bytes(bytes(3073))
    assert words in refused(capsys, code, *BENCH, *argv)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--data-root", "nowhere"), 3, "--data-root nowhere does not exist"),
        (("--out", "file"), 5, "file is not a directory; choose another --out"),
        (("--out", "file/below"), 5, "file is not a directory; choose another --out"),
        (("--out", "nowhere", "--resume"), 7, "no run in nowhere to resume"),
        (("--gpus", "64"), 2, "the plan is for 2 devices, asked for 64; plan again with --gpus"),
    ],
)
def test_folders_that_cannot_be_used_are_seen_before_anything_is_started(argv, code, words, place, capsys, monkeypatch):
    monkeypatch.setattr("asa.cli.commands.train._train", lambda *_: pytest.fail("started to train"))
    (place / "file").write_text("")
    codec.save(nouns.plan(), place / "plan.json")
    assert words in refused(capsys, code, "train", "plan.json", *argv)
    assert not (place / "nowhere").exists()


def test_more_cpu_ranks_than_were_measured_are_derived_and_found_again(place, capsys):
    assert entry.run(["plan", "--gpus", "8", "--strategies", "ddp", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["gpus"], made["cluster"], made["origin"]) == (8, "box-as-8", "estimated")
    assert "the links of box-as-8 are derived, not measured here" in made["notes"]
    assert entry.run(["plan", "--gpus", "2", "--strategies", "ddp", "--json"]) == 0
    two = json.loads(capsys.readouterr().out)["prediction"]
    assert made["prediction"]["compute_s"] > two["compute_s"], "more ranks on the same cores compute nothing faster"
    assert entry.run(["simulate", "runs/plans/tiny.box-as-8.8.json"]) == 0


def test_whole_strategies_that_do_not_fit_come_with_a_memory_that_does(capsys):
    said = refused(capsys, 4, "plan", "--strategies", "ddp,tensor", "--memory", "0.1")
    assert "GiB of 102 MiB" in said or "MiB of 102 MiB" in said
    enough = said.split("try --memory ")[1].split()[0]
    assert entry.run(["plan", "--strategies", "ddp,tensor", "--memory", enough]) == 0


def test_memory_below_a_device_s_context_is_said_to_be_that(capsys):
    said = refused(
        capsys, 4, "plan", "--strategies", "ddp", "--gpus", "2", "--cluster", "a100-nvlink-8", "--memory", "0.5"
    )
    assert "356 MiB, and the context of the device leaves nothing of its memory" in said
    assert "try --memory " in said


def test_more_stages_than_components_come_with_devices_that_do(capsys):
    said = refused(capsys, 4, "plan", "--strategies", "1f1b", "--gpus", "8")
    assert "1f1b cannot be had: needs a component for each of its 8 stages, the model has 3; " in said
    assert said.endswith("try --gpus 3 or --strategies asa")
    assert entry.run(["plan", "--strategies", "1f1b", "--gpus", "3"]) == 0
    capsys.readouterr()
    assert entry.run(["plan", "--gpus", "8", "--time-limit", "0.1s"]) == 0
    assert entry.run(["explain", "--why-not", "1f1b"]) == 0
    assert "1f1b cannot be run: needs a component for each of its 8 stages" in capsys.readouterr().out


def test_too_few_samples_for_every_rank_come_with_a_batch_that_has_them(capsys):
    words = ("plan", "--gpus", "8", "--global-batch", "4", "--strategies", "ddp")
    assert "try --gpus 4 or --global-batch 8" in refused(capsys, 4, *words)
    assert entry.run([*words[:3], "--global-batch", "8", "--strategies", "ddp"]) == 0


def test_the_search_is_named_as_a_remedy_only_where_it_finds_something(capsys):
    said = refused(capsys, 4, "plan", "--strategies", "ddp", "--pin", "head=tensor@2")
    assert said.endswith("ddp cannot be had: not allowed by the pins; try --strategies asa")
    assert "--strategies asa" not in refused(capsys, 4, "plan", "--strategies", "ddp", "--memory", "0.0001")


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", "-o", "file/plan.json"),
        ("plan", "-o", "profiles"),
        ("profile", "cnn", "-o", "file/p.json"),
        ("profile", "cnn", "-o", "/proc/p.json"),
        ("plan", "--report", "/proc/page"),
        ("explain", "--report", "/proc/page"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_the_work(argv, place, capsys):
    (place / "file").write_text("")
    said = refused(capsys, 5, *argv)
    assert "cannot write" in said
    assert said.endswith(f"choose another {argv[-2]}")


def test_batches_that_no_device_holds_are_refused_before_the_model_is_built(capsys, monkeypatch):
    monkeypatch.setattr("asa.profiler.measure.build", lambda *_, **__: pytest.fail("built a model"))
    said = refused(capsys, 5, "profile", "cnn", "--global-batch", "100000000")
    assert "100000000 samples of 3x32x32 are 1144 GiB before any of the model" in said
    assert "take a --global-batch far below" in said
    assert refused(capsys, 5, "profile", "cnn", "--input", "3x99999x99999").endswith("take a smaller --input")
    assert refused(capsys, 5, "profile", "gpt2", "--tokens", "1000000000000").endswith("take a smaller --tokens")


def test_memory_that_ran_out_is_no_fault_of_the_program(capsys, monkeypatch):
    def hungry(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes.")

    monkeypatch.setattr("asa.profiler.measure.build", hungry)
    assert "memory ran out in this process, which asked for 2.00 GiB" in refused(capsys, 5, "profile", "cnn")


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))]
)
def test_a_system_that_starts_no_more_processes_is_no_fault_of_the_program(capsys, monkeypatch, error):
    monkeypatch.setattr("asa.profiler.measure.build", Mock(side_effect=error))
    assert "the system allows no more processes or threads" in refused(capsys, 5, "profile", "cnn")


def test_a_limit_of_the_size_of_files_is_named(capsys, monkeypatch):
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG), "large.json")
    monkeypatch.setattr("asa.profiler.measure.build", Mock(side_effect=error))
    said = refused(capsys, 5, "profile", "cnn")
    assert said.endswith("large.json: File too large; raise the largest size of a file: ulimit -f unlimited")


def test_a_trace_that_cannot_be_written_is_one_document(place, capsys):
    (place / "file").write_text("")
    assert entry.run(["plan", "--gpus", "1", "--time-limit", "0.1s", "-o", "p.json"]) == 0
    capsys.readouterr()
    assert entry.run(["simulate", "p.json", "--trace", "file/t.json", "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["exit_code"] == 5


def test_a_component_strategy_is_answered_with_the_name_of_the_whole_one(capsys):
    assert "of the whole model it is called fsdp" in refused(capsys, 2, "plan", "--strategies", "zero3")
    assert "no strategy 'Fdsp'; did you mean fsdp?" in refused(capsys, 2, "plan", "--strategies", "Fdsp")


def test_nothing_to_resume_is_7_and_leaves_nothing(place, capsys):
    codec.save(nouns.plan(), place / "runs" / "plans" / "p.json")
    assert "no run in gone to resume" in refused(capsys, 7, "train", "--resume", "--out", "gone")
    assert not (place / "gone").exists()
    lost = place / "runs" / "train" / "lost"
    lost.mkdir(parents=True)
    (lost / "plan.json").symlink_to("nowhere")
    for command in (("train", "--resume"), ("export",)):
        assert "in runs/train/ to" in refused(capsys, 7, *command)


def test_a_plan_for_devices_that_are_not_there_is_5_and_leaves_nothing(place, capsys):
    torch = pytest.importorskip("torch")
    ranks = torch.cuda.device_count() + 1
    stem = nouns.plan().components[0]
    one = dataclasses.replace(stem, data=dataclasses.replace(stem.data, degree=1))
    made = dataclasses.replace(
        nouns.plan(), device_type="cuda", gpus=ranks, components=(one,), stages=(Stage(ranks=tuple(range(ranks))),),
        prediction=dataclasses.replace(nouns.plan().prediction, memory_bytes_per_rank=(1,) * ranks),
    )  # fmt: skip
    codec.save(made, place / "plan.json")
    said = refused(capsys, 5, "train", "plan.json", "--out", "run")
    needs = f"the plan needs {ranks} CUDA device{'s' * (ranks > 1)}, this machine has {ranks - 1}"
    assert needs in said
    assert not (place / "run").exists()
    said = refused(capsys, 5, "verify", "plan.json")
    assert needs in said


def test_the_best_plans_are_told_in_order(place, capsys):
    assert entry.run(["plan", "--top", "6", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    times = [p["prediction"]["step_time_s"] for p in (made, *made["alternatives"])]
    assert times == sorted(times)
    assert times[0] <= min(b["step_time_s"] for b in made["baselines"] if b["fits"])


def test_too_few_samples_to_verify_on(place, capsys):
    codec.save(nouns.plan(), place / "plan.json")
    assert "need 2; raise --samples" in refused(capsys, 2, "verify", "plan.json", "--samples", "1")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpus", "3"), "asked for 3 devices, cluster box has 2"),
        (("--strategies", "dpp"), "no strategy 'dpp'"),
        (("--pin", "head"), "is not of the form COMPONENT=STRATEGY"),
        (("--offload", "always"), "offload saves nothing on box"),
    ],
)
def test_a_request_is_refused_before_the_model_is_looked_at(more, words, capsys, monkeypatch):
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured something")

    monkeypatch.setattr("asa.cli.choose.measured", measured)
    assert words in refused(capsys, 2, "plan", "cnn", "--cluster", "box", *more)


def test_options_come_after_the_command(capsys):
    assert entry.run(["--json", "doctor"]) == 2
    assert "--json stands before the command; options come after it, as in `asa plan --json`" in capsys.readouterr().err
    assert entry.run(["plan", "--help", "--json"]) == 0
    assert "usage: asa plan" in capsys.readouterr().out, "help is no document"


def test_the_settings_of_several_commands_are_shown_by_the_word_they_begin_with(capsys):
    assert entry.run(["config", "show", "cluster", "--json"]) == 0
    found = {row["verb"] for row in json.loads(capsys.readouterr().out)["settings"]}
    assert found == {"cluster list", "cluster show", "cluster measure"}


def test_a_model_of_torchvision_goes_by_its_name_alone(capsys):
    assert "go by their name alone, resnet18" in refused(capsys, 2, "profile", "torchvision:resnet18")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("plan", "folder"), 2, "no model is called 'folder', and folder is a directory; name a model"),
        (("plan", "loop"), 2, "loop is a link that leads nowhere; name a model"),
        (("profile", "p.json"), 2, "no model is called 'p.json', and p.json is a regular file; name a model"),
        (("plan", "--from-run", "nope"), 3, "--from-run nope does not exist; name one of runs/train/"),
        (("plan", "--from-run", "p.json"), 3, "--from-run p.json is a regular file, not a run's folder"),
        (("train", "resnet18", "--resume", "--out", "folder"), 7, "no checkpoint in folder/checkpoints; leave out"),
        (("plan", "--cluster", "pipe"), 3, "cannot use pipe: it is a pipe; name a cluster file or a preset"),
        (("train", "p.json", "--data", "csv:folder"), 3, "--data csv:folder: folder is a directory, not a file"),
        (("train", "p.json", "--data", "arrow:folder"), 3, "not a file; --data hf:folder reads a folder that save_to"),
        (("train", "p.json", "--data", "folder:p.json"), 3, "p.json is a regular file, not a folder"),
        (("plan", "--input", "²x3x3"), 2, "'²x3x3' is not CxHxW, as in 3x32x32"),
        (("launch", "k8s", "p.json", "--volume", "Ü"), 2, "'Ü' is no name of a claim: up to 253 lower-case letters"),
        (("plan", "--cluster", "folder"), 3, "cannot use folder: it is a directory; name a cluster file or a preset"),
        (("plan", "half.json"), 3, "half.json is not valid JSON: it ends too early, after 300 bytes; copy or write it"),
        (("explain", "folder"), 3, "folder has no log.jsonl, so it is no run's folder; name one of runs/train/"),
        (("plan", "--memory", "0"), 2, "--memory: 0 is not above 0"),
        (("plan", "--memory", "2XB"), 2, "'2XB' is no amount of memory; write 80, 80GiB or 512MiB"),
        (("simulate", "p.json", "--trace", "folder"), 2, "--trace folder: Perfetto reads names that end in .json"),
        (("train", "p.json", "--loss", "foo"), 2, "no loss is called 'foo'; there are cross_entropy, mse, bce and"),
        (("train", "p.json", "--metric", "foo"), 2, "no metric is called 'foo'; there are accuracy, top5"),
        (("train", "p.json", "--schedule", "nowhere:f"), 2, "schedule 'nowhere:f': no module 'nowhere' to import"),
        (("profile", "gpt2", "--input", "3x32x32"), 2, "gpt2 reads tokens, not images; try --tokens 1024"),
    ],
)
def test_what_is_no_file_and_what_is_no_name_is_told_at_once(argv, code, words, place, capsys, monkeypatch):
    for late in ("asa.cli.commands.train._train", "asa.cli.choose.measured"):
        monkeypatch.setattr(late, lambda *_, **__: pytest.fail("began to work"))
    (place / "folder").mkdir()
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "pipe")
    (place / "half.json").write_text(codec.dumps(nouns.plan())[:300])
    codec.save(nouns.plan(), place / "p.json")
    assert words in refused(capsys, code, *argv)


def test_names_that_are_told_at_once_are_those_that_training_has():
    pytest.importorskip("torch")
    from asa.executor.training import aims
    from asa.zoo.names import AIMS

    known = {"loss": aims.LOSSES, "metric": aims.METRICS, "schedule": aims.SCHEDULES}
    assert {what: tuple(names) for what, names in known.items()} == AIMS


def test_a_disk_that_fills_up_is_told_with_the_file_and_the_remedy(place, capsys, monkeypatch):
    codec.save(nouns.plan(), place / "kept.json")
    before = (place / "kept.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.chmod", full)
        with pytest.raises(OSError, match=r"kept\.json"):
            codec.save(nouns.plan(), place / "kept.json")
        said = refused(capsys, 5, "plan", "--strategies", "ddp", "--time-limit", "0.1s")
    assert "runs/plans/" in said
    assert said.endswith("No space left on device; free some space, or work in a folder of another disk")
    assert (place / "kept.json").read_bytes() == before
    assert not list(place.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("kind", "torch", "first"),
    [("cuda", True, "asa explain"), ("cpu", False, "asa explain"), ("cpu", True, "asa train")],
)
def test_what_is_proposed_next_can_be_done_here(kind, torch, first, monkeypatch):
    from asa.cli.commands.plan import VERBS, _next

    box = nouns.cluster()
    box = dataclasses.replace(box, device=dataclasses.replace(box.device, type=kind))
    monkeypatch.setattr("asa.cli.commands.plan.driver", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if torch else None)
    args = arguments(VERBS[0], ("tiny", "--gpus", "2"), {})
    found = _next(box, nouns.plan(), args)
    assert found[0].startswith(first)
    assert ("asa launch slurm" in found) == (kind == "cuda")
    assert ("asa plan tiny --gpus 2 --verify 3" in found) == (first == "asa train"), "the same plan, measured"
    elsewhere = _next(box, nouns.plan(), arguments(VERBS[0], ("-o", "a b.json"), {}))
    assert all("'a b.json'" in command for command in elsewhere), "it is not where commands look for the newest plan"


def test_a_device_is_written_to_and_never_replaced_and_a_link_stays_one(place):
    os.mkfifo("pipe")
    Path("link.json").symlink_to("target.json")
    reader = os.open("pipe", os.O_RDWR)
    codec.write("text", Path("pipe"))
    codec.write("text", Path("link.json"))
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert Path("pipe").is_fifo()
    assert Path("link.json").is_symlink()
    assert Path("target.json").read_text() == "text"
    places.check_writable(Path("/dev/null"), "-o")
    os.mkfifo("unread")  # writing to it would wait for ever
    codec.write("text", Path("unread"))
    assert Path("unread").read_text() == "text"


def test_a_plan_is_made_in_a_folder_that_cannot_be_written(place, monkeypatch, capsys):
    codec.save(nouns.profile(), place / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), place / "profiles" / "cluster.box.json")
    monkeypatch.setattr(places, "ORIGINS", Path("/proc/origins"))
    words = ["plan", "profiles/tiny.json", "--gpus", "2", "-o", "elsewhere.json"]
    assert entry.run([*words, "--cluster", "box"]) == 0
    said = capsys.readouterr().err
    assert "profile and cluster are not kept beside the plan (/proc/origins: " in said
    assert "asa cluster measure" not in said, "it was named"
    assert Path("elsewhere.json").is_file()
    other = nouns.cluster()
    other = dataclasses.replace(other, device=dataclasses.replace(other.device, name="Another CPU"))
    codec.save(other, place / "profiles" / "cluster.box.json")
    monkeypatch.setattr(places, "SHIPPED", place)
    assert entry.run(words) == 0
    assert "links as of box, of Another CPU; `asa cluster measure --gpus 2` measures those here" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_a_page_that_cannot_be_drawn_is_told_before_the_plan(place, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("asa.planner.plan", lambda *_: pytest.fail("planned"))
    for words in (["plan", "resnet50", "--gpus", "2"], ["explain"]):
        assert entry.run([*words, "--report", "page"]) == 5
        assert capsys.readouterr().err == (
            "asa: --report needs matplotlib, which is not installed: pip install 'asa-parallel[train]'\n"
        )


def test_a_working_directory_that_is_gone_is_told(place, monkeypatch, capsys):
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    assert entry.run(["cluster", "list"]) == 5
    assert capsys.readouterr().err == "asa: the working directory no longer exists; change to one that does\n"


@pytest.mark.parametrize(
    "argv", [("cluster", "measure", "--gpus", "2"), ("bench", "--models", "cnn"), ("profile", "cnn")]
)
def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(argv, place, capsys, monkeypatch):
    monkeypatch.setattr("asa.cli.bench_setup.device_of", lambda *_: pytest.fail("looked at devices"))
    monkeypatch.setattr(places, "COMPARISONS", Path("/proc/runs"))
    monkeypatch.setattr(places, "PROFILES", Path("/proc/profiles"))
    said = refused(capsys, 5, *argv)
    assert "cannot write /proc/" in said
    assert "; choose another -" in said


@pytest.mark.parametrize("argv", [("launch", "slurm", "p.json"), ("export", "p.json", "--to", "torch")])
def test_a_full_disk_leaves_the_file_that_was_there(argv, place, capsys, monkeypatch):
    codec.save(nouns.plan(), place / "p.json")
    (place / "job").write_text("kept")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.chmod", full)
    said = refused(capsys, 5, *argv, "-o", "job")
    assert said.endswith("job: No space left on device; free some space, or work in a folder of another disk")
    assert (place / "job").read_text() == "kept"


def test_memory_that_ranks_share_and_cannot_have_is_named(place, capsys, monkeypatch):
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/dev/shm/pym-1")

    monkeypatch.setattr(places, "newest_plan", read_only)
    said = refused(capsys, 5, "verify", "plan.json")
    assert said.startswith("asa: /dev/shm/pym-1: Read-only file system; ranks share memory there: mount it")
