"""The command line without the work behind it: options, where values come from, errors, exit codes, streams."""

from __future__ import annotations

import doctest
import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import nouns
import pytest
from rich.console import Console as Screen

from asa import errors
from asa.cli import choose, entry, options, places, planned_here, settings, verbs
from asa.cli.console import Console
from asa.cli.verb import Arguments, Option, Verb
from asa.cost.machine import presets
from asa.ir import chips, codec
from asa.ir.profile import DeviceRecord
from asa.report.text import cluster as cluster_report
from asa.report.text import tables

ALL = [verb for word in verbs.VERBS for verb in verbs.verbs(word)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test in an empty directory, with none of the user's variables."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("ASA_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def own_verb(monkeypatch):
    """Put a verb of the test's own into the command line, as ``asa probe``."""

    def put(run, *opts: Option) -> None:
        made = Verb(name="probe", help="a test", run=run, options=(*opts, options.JSON))
        monkeypatch.setitem(verbs.VERBS, "probe", ("nowhere", "a test"))
        monkeypatch.setitem(sys.modules, "nowhere", SimpleNamespace(VERBS=(made,)))

    return put


def one_line(text: str) -> str:
    assert text.startswith("asa: ")
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize("module", [options, places, chips])
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("verb", ALL, ids=lambda v: v.name)
def test_every_verb_has_help_for_itself_and_every_option(verb, capsys):
    assert entry.run([*verb.name.split(), "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert verb.help[1:] in said
    for option in verb.options:
        assert option.help
        assert option.positional or f"--{option.name}" in said
    assert "json" in {option.name for option in verb.options}


def test_the_overview_names_every_verb(capsys):
    assert entry.run(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {word} " in said for word in verbs.VERBS)
    assert entry.run([]) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plam"], "did you mean `asa plan`?"),
        (["nonsense-entirely"], "is no command"),
        (["cluster"], "cluster list"),
        (["cluster", "lits"], "cluster list"),
        (["profile"], "MODEL is missing"),
        (["plan", "--gpus", "x"], "--gpus: 'x' is not a whole number"),
        (["plan", "--gpus", "0"], "--gpus: 0 is below 1"),
        (["plan", "--gpus"], "--gpus needs a value"),
        (["plan", "--memory", "-5GB"], "--memory needs a value; one that begins with a dash follows an equals sign"),
        (["plan", "--memory=-5GB"], "--memory: -5 is not above 0"),
        (["plan", "-o"], "--output needs a value"),
        (["plan", "--gpu", "3"], "--gpu"),
        (["plan", "--solver", "magic"], "'magic' is none of ilp, dp, exhaustive"),
        (["plan", "--memory", "nan"], "--memory: nan is not above 0"),
        (["plan", "--memory", "-1"], "--memory"),
        (["profile", "resnet50", "--input", "32x32"], "is not CxHxW"),
        (["profile", "resnet50", "--time-limit", "soon"], "is not a time span"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(argv, words, capsys):
    assert entry.run(argv) == 2
    said = capsys.readouterr()
    assert words in one_line(said.err)
    assert said.out == ""


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError("why"),
        errors.InvalidInputError("why", where="$.x"),
        errors.InfeasibleError("why"),
        errors.UnavailableError("why"),
        errors.WorkersFailedError("why\nreally", rank=1),
        errors.NoCheckpointError("why"),
        errors.PreemptedError("why"),
        errors.AsaError("why"),
    ],
)
def test_errors_end_in_their_exit_code_and_one_line(error, own_verb, capsys):
    def fail(args: Arguments, console: Console) -> None:
        raise error

    own_verb(fail)
    assert entry.run(["probe"]) == error.exit_code
    assert one_line(capsys.readouterr().err).startswith("asa: why")
    assert entry.run(["probe", "--json"]) == error.exit_code
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "error"
    assert data["exit_code"] == error.exit_code
    assert data["schema_version"] == codec.SCHEMA_VERSION


def test_a_bug_is_one_line_unless_the_traceback_is_asked_for(own_verb, capsys, monkeypatch):
    def fail(args: Arguments, console: Console) -> None:
        raise KeyError("layer4")

    own_verb(fail)
    assert entry.run(["probe"]) == 1
    said = one_line(capsys.readouterr().err)
    assert "KeyError: 'layer4'" in said
    assert "ASA_DEBUG=1" in said
    monkeypatch.setenv("ASA_DEBUG", "1")
    assert entry.run(["probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_the_environment(own_verb, capsys, elsewhere):
    (elsewhere / "file").write_text("")

    def fail(args: Arguments, console: Console) -> None:
        codec.save(nouns.plan(), elsewhere / "file" / "plan.json")

    own_verb(fail)
    assert entry.run(["probe"]) == 5
    assert "file" in one_line(capsys.readouterr().err)


def test_a_package_that_cannot_be_loaded_is_the_environment(own_verb, capsys):
    def fail(args: Arguments, console: Console) -> None:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object", name="torch._C")

    own_verb(fail)
    assert entry.run(["probe"]) == 5
    assert "torch is installed and cannot be loaded: libtorch_cpu.so: failed" in one_line(capsys.readouterr().err)


def test_a_machine_without_a_place_for_temporary_files_is_told_so(own_verb, capsys):
    def fail(args: Arguments, console: Console) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    own_verb(fail)
    assert entry.run(["probe"]) == 5
    line = one_line(capsys.readouterr().err)
    assert line.endswith("found in ['/tmp']; set TMPDIR to a folder that can be written\n")


def test_only_the_document_reaches_stdout(own_verb, capfd):
    def chatter(args: Arguments, console: Console) -> None:
        os.write(1, b"from a C library\n")
        print("from a worker", flush=True)
        console.show("a table")
        console.result({"schema_version": 1, "kind": "probe"}, lambda: ["a table"])

    own_verb(chatter)
    assert entry.run(["probe", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out) == {"schema_version": 1, "kind": "probe"}
    assert "from a C library" in said.err
    assert "from a worker" in said.err
    assert entry.run(["probe"]) == 0
    assert "a table" in capfd.readouterr().out


def test_other_ranks_are_silent(own_verb, capfd, monkeypatch):
    def talk(args: Arguments, console: Console) -> None:
        console.say("words")
        console.result({"schema_version": 1}, lambda: ["a table"])

    own_verb(talk)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert entry.run(["probe"]) == 0
    assert "a table" in capfd.readouterr().out, "no launcher"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert entry.run(["probe"]) == 0
    assert entry.run(["probe", "--json"]) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ""


def test_no_progress_where_nobody_watches(own_verb, capfd):
    def work(args: Arguments, console: Console) -> None:
        with console.progress("working") as report:
            report(0.5, "halfway")

    own_verb(work)
    assert entry.run(["probe"]) == 0
    assert capfd.readouterr() == ("", "")


PROBE = Verb(
    name="probe sub",
    help="",
    run=lambda args, console: None,
    options=(
        Option(name="global-batch", help="", parse=options.count, default=7),
        Option(name="strategies", help="", parse=options.names),
        Option(name="pin", help="", repeated=True),
        options.JSON,
    ),
)


def resolved(argv=(), environment=None) -> Arguments:
    return settings.arguments(PROBE, argv, environment or {})


def test_flag_over_variable_over_file_over_default(elsewhere):
    assert resolved().global_batch == 7
    (elsewhere / "pyproject.toml").write_text("[tool.asa]\nglobal_batch = 5\n")
    assert resolved().origin["global_batch"] == "file pyproject.toml"
    (elsewhere / "asa.toml").write_text("global-batch = 1\ntop = 3\n[probe.sub]\nglobal-batch = 2\n")
    assert resolved().global_batch == 2
    assert resolved().origin["global_batch"] == "file asa.toml"
    found = resolved(environment={"ASA_GLOBAL_BATCH": "3"})
    assert (found.global_batch, found.origin["global_batch"]) == (3, "env ASA_GLOBAL_BATCH")
    found = resolved(["--global-batch", "4"], {"ASA_GLOBAL_BATCH": "3"})
    assert (found.global_batch, found.origin["global_batch"]) == (4, "flag")
    assert not resolved().given("strategies")


def test_lists_and_switches_from_every_source(elsewhere):
    found = resolved(["--pin", "a=tensor@2", "--pin", "b=zero3@2"], {"ASA_JSON": "yes", "ASA_STRATEGIES": "ddp,asa"})
    assert found.pin == ("a=tensor@2", "b=zero3@2")
    assert found.strategies == ("ddp", "asa")
    assert found.json is True
    assert resolved().pin == ()
    assert resolved(environment={"ASA_JSON": "0"}).json is False
    (elsewhere / "asa.toml").write_text('strategies = ["ddp", "tensor"]\njson = true\npin = ["c=tensor@2"]\n')
    assert (resolved().strategies, resolved().json, resolved().pin) == (("ddp", "tensor"), True, ("c=tensor@2",))


def test_bad_variables_and_files_are_told_apart(elsewhere):
    with pytest.raises(errors.UsageError, match="ASA_GLOBAL_BATCH: 'many' is not a whole number"):
        resolved(environment={"ASA_GLOBAL_BATCH": "many"})
    (elsewhere / "asa.toml").write_text("[probe.sub]\nglobal-batsch = 2\n")
    with pytest.raises(errors.InvalidInputError, match="has no option 'global-batsch'"):
        resolved()
    (elsewhere / "asa.toml").write_text("[probe.sub.deeper]\nx = 2\n")
    with pytest.raises(errors.InvalidInputError, match="has no option 'deeper'"):
        resolved()
    (elsewhere / "asa.toml").write_text("global_batch = 2\nglobal-batch = 4\n")
    with pytest.raises(errors.InvalidInputError, match="global-batch is given twice, with '-' and with '_'"):
        resolved()
    (elsewhere / "asa.toml").write_text("[cluster]\ngpus = 2\n")
    with pytest.raises(errors.InvalidInputError, match="has a table for list, show, measure, and none called 'gpus'"):
        resolved()
    (elsewhere / "asa.toml").write_text("global-batsch = 2\n")
    with pytest.raises(
        errors.InvalidInputError, match="no command has an option 'global-batsch'; did you mean global-b"
    ):
        resolved()
    (elsewhere / "asa.toml").write_text("[prove]\nx = 2\n")
    with pytest.raises(errors.InvalidInputError, match="no command is called 'prove'; did you mean probe"):
        resolved()
    (elsewhere / "asa.toml").write_text("global-batch = true\n")
    with pytest.raises(errors.InvalidInputError, match=r"asa\.toml: global-batch"):
        resolved()
    (elsewhere / "asa.toml").write_text("[probe")
    with pytest.raises(errors.InvalidInputError, match=r"asa\.toml"):
        resolved()


def test_config_show_says_where_values_come_from(capsys, monkeypatch):
    monkeypatch.setenv("ASA_GPUS", "4")
    assert entry.run(["config", "show", "plan", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert rows["gpus"] == {"verb": "plan", "name": "gpus", "value": 4, "from": "env ASA_GPUS"}
    assert rows["solver"]["from"] == "default"
    assert entry.run(["config", "show"]) == 0
    assert "env ASA_GPUS" in capsys.readouterr().out
    assert entry.run(["config", "show", "plam"]) == 2


def test_the_newest_profile_is_the_one_with_the_latest_date_inside(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(places, "SHIPPED", elsewhere / "source" / "profiles")
    old, new = nouns.profile("2025-01-01T00:00:00+00:00", "old"), nouns.profile("2025-02-01T00:00:00+00:00", "new")
    codec.save(new, elsewhere / "profiles" / "new.json")
    codec.save(old, elsewhere / "profiles" / "old.json")
    codec.save(nouns.cluster(), elsewhere / "profiles" / "cluster.box.json")
    (elsewhere / "profiles" / "broken.json").write_text("{")
    assert [p.model_spec for _, p in places.profiles(Console())] == ["new", "old"]
    assert "passed over: profiles/broken.json is not valid JSON" in capsys.readouterr().err
    assert [c.name for _, c in places.clusters(Console())] == ["box"]


def test_a_profile_of_ones_own_is_taken_before_a_newer_one_that_is_shipped(elsewhere, monkeypatch):
    monkeypatch.setattr(places, "SHIPPED", elsewhere / "package")
    for folder, created in (
        (places.SHIPPED, "2026-01-02T03:04:05+00:00"),
        (places.PROFILES, "2025-01-02T03:04:05+00:00"),
    ):
        codec.save(nouns.profile(created), folder / "tiny.json")
    assert [path for path, _ in places.profiles(Console())] == [
        Path("profiles/tiny.json"),
        elsewhere / "package/tiny.json",
    ]


def test_a_profile_of_another_input_leaves_the_first_where_it_is(tmp_path):
    first, path = nouns.profile(), tmp_path / "tiny.cpu.fp32.json"
    larger = replace(first, graph=replace(first.graph, input_shape=(3, 9, 9)))
    assert places.path_for(path, first) == path
    codec.save(first, path)
    assert places.path_for(path, nouns.profile(created="2026-01-02T03:04:05+00:00")) == path
    other = places.path_for(path, larger)
    assert other.name == f"tiny.3x9x9-{first.graph.num_classes}.cpu.fp32.json"
    path.write_text("torn")
    assert places.path_for(path, larger) == path


def test_profiles_beside_the_source_are_found_from_anywhere(elsewhere, monkeypatch):
    monkeypatch.setattr(places, "SHIPPED", elsewhere / "source" / "profiles")
    codec.save(nouns.profile(), elsewhere / "source" / "profiles" / "tiny.json")
    ((path, found),) = places.profiles(Console())
    assert found.model_spec == "tiny"
    assert places.shown(path) == "tiny.json (shipped)"


def test_the_newest_plan_is_the_one_written_last(elsewhere):
    with pytest.raises(errors.InvalidInputError, match="make one with `asa plan`"):
        places.newest_plan(None)
    for i, strategy in enumerate(("ddp", "asa", "tensor")):
        path = elsewhere / "runs" / "plans" / f"{strategy}.json"
        codec.save(nouns.plan(strategy), path)
        os.utime(path, (1000 + i, 1000 + i))
    assert places.newest_plan(None)[1].strategy == "tensor"
    assert places.newest_plan("runs/plans/asa.json")[1].strategy == "asa"
    with pytest.raises(errors.InvalidInputError, match="cannot read"):
        places.newest_plan("gone.json")


def test_a_link_that_leads_nowhere_is_no_plan(elsewhere):
    places.PLANS.mkdir(parents=True)
    codec.save(nouns.plan(), places.PLANS / "a.json")
    (places.PLANS / "b.json").symlink_to("nowhere")
    assert places.newest_plan(None)[0] == places.PLANS / "a.json"


def test_a_stored_origin_that_was_damaged_is_written_again(elsewhere):
    made = nouns.profile()
    path = places.ORIGINS / f"{codec.fingerprint(made)}.json"
    places.keep_origins(made)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert not places.origin(type(made), codec.fingerprint(made))
    places.keep_origins(made)
    assert path.read_bytes() == whole


def test_a_text_with_a_name_that_is_no_text_is_refused(elsewhere):
    with pytest.raises(errors.UsageError, match="not UTF-8; rename"):
        codec.write("a folder: " + os.fsdecode(b"run\xff"), elsewhere / "job.sh")
    assert not list(elsewhere.iterdir())


def test_a_file_whose_name_is_as_long_as_can_be_is_written(elsewhere):
    codec.write("text", elsewhere / ("a" * 250))
    assert (elsewhere / ("a" * 250)).read_text() == "text"


def test_the_default_cluster_is_measured_large_enough_and_of_the_same_device(elsewhere, monkeypatch):
    monkeypatch.setattr(places, "SHIPPED", elsewhere / "source" / "profiles")
    for n in (2, 4):
        codec.save(nouns.cluster(n, f"box{n}"), elsewhere / "profiles" / f"cluster.box{n}.json")
    assert (
        choose.default_cluster(
            Console(), DeviceRecord(name="Test CPU", type="cpu", memory_bytes=2**30, threads=1), 3
        ).name
        == "box4"
    )
    assert choose.named_cluster("box2").num_devices == 2
    assert choose.named_cluster("profiles/cluster.box4.json").num_devices == 4


def test_one_device_of_a_kind_that_nobody_has_measured_needs_no_cluster(elsewhere):
    strange = DeviceRecord(name="Nobody's GPU", type="cuda", memory_bytes=2**34, threads=1)
    found = choose.default_cluster(Console(), strange, 1)
    assert (found.device.name, found.device.memory_bytes, found.num_devices) == ("Nobody's GPU", 2**34, 1)
    with pytest.raises(errors.UnavailableError, match="asa cluster measure --gpus 2"):
        choose.default_cluster(Console(), strange, 2)


def test_every_cluster_that_is_listed_can_be_named(capsys):
    assert entry.run(["cluster", "list", "--json"]) == 0
    listed = {c["name"] for c in json.loads(capsys.readouterr().out)["clusters"]}
    assert "local-gloo-2" in listed, "shipped"
    for name in listed:
        assert choose.named_cluster(name).name == name


def test_work_goes_on_when_nobody_reads_its_lines_any_more(tmp_path):
    code = (
        "import pathlib\nfrom asa.cli.console import Console\n"
        "for i in range(9):\n    Console().line(f'epoch {i}')\n    Console().text('a script')\n"
        "    Console().show('a table')\n"
        f"pathlib.Path({str(tmp_path / 'end')!r}).touch()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (0, b"")
    process.stderr.close()
    assert (tmp_path / "end").exists()


def test_a_closed_stdout_is_like_one_nobody_reads():
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m asa cluster list >&- 2>&-; echo $?'], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("words", ["cluster list --json", "cluster list", "schema plan", "--version", "plan --help"])
def test_a_result_that_cannot_be_written_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "asa", *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1)
    assert "cannot write" in done.stderr
    assert "to stdout" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_another_encoding_shows_what_it_can(own_verb, monkeypatch, encoding):
    def show(_args: Arguments, console: Console) -> None:
        console.show(tables.line("✓ ok – a/ü\udcff.json → 5"))
        console.text("✗ a/ü\udcff.json → 5")

    own_verb(show)
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert entry.run(["probe"]) == 0
    stream.flush()
    said = stream.buffer.getvalue().decode(encoding)
    assert {"ascii": "+ ok - a/\\xfc", "latin-1": "+ ok - a/ü", "utf-8": "✓ ok – a/ü"}[encoding] in said
    assert "\\udcff.json" in said


def test_help_of_a_command_may_be_asked_for_by_its_name(capsys):
    assert entry.run(["help", "cluster", "show"]) == 0
    assert "usage: asa cluster show" in capsys.readouterr().out


def test_a_flag_that_is_not_there_is_answered_with_the_nearest(capsys):
    assert entry.run(["plan", "resnet50", "--gpu", "8"]) == 2
    assert "unrecognized arguments: --gpu 8; did you mean --gpus?; see `asa plan --help`" in capsys.readouterr().err
    assert entry.run(["plan", "resnet50", "--batch", "8"]) == 2
    assert "did you mean --global-batch?" in capsys.readouterr().err
    assert entry.run(["plan", "--nonsense"]) == 2
    assert "unrecognized arguments: --nonsense; see `asa plan --help`" in capsys.readouterr().err


def test_only_commands_that_have_the_option_are_told_to_name_a_profile(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(places, "profiles", lambda _console: [])
    monkeypatch.setattr(places, "estimates", lambda _console: [])
    codec.save(nouns.plan(), elsewhere / "plan.json")
    offering = [v.name for v in ALL if any(o.name == "profile" for o in v.options)]
    assert offering
    for name in offering:
        assert entry.run([name, "plan.json"]) == 3
        assert "name it with --profile, or plan again" in capsys.readouterr().err
    with pytest.raises(errors.InvalidInputError, match="put it there, or plan again"):
        choose.origins(nouns.plan(), Console())


def test_long_work_off_a_terminal_says_a_line_every_ten_seconds(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr("asa.cli.console.time.monotonic", lambda: now)
    with Console(as_json=True).progress("profiling cnn") as report:
        for second in range(31):
            now = 100.0 + second
            report(second / 40, f"component {second}")
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0] == "asa: profiling cnn: component 10, 25 % after 10 s, about 30 s left"
    with Console().progress("profiling cnn") as report:
        now += 20
        report(0.01, "tracing")
    assert capsys.readouterr().err == "asa: profiling cnn: tracing, 1 % after 20 s\n", "not: 1980 s left"
    assert len(lines) == 3


SLOW = """
import sys, time
from asa import planner
from asa.cli import console, entry
console.LINE_EVERY_S = 0.01
plan = planner.plan
def slow(*args):
    time.sleep(0.2)
    return plan(*args)
planner.plan = slow
sys.exit(entry.run(["plan", "tiny", "--gpus", "2", "--json"]))
"""
SILENT = """
import time
from asa.cli import console
console.LINE_EVERY_S = 0.01
with console.Console().progress("profiling tiny") as report:
    report(0.01, "tracing")
    time.sleep(0.2)
print('{"kind": "plan"}')
"""


@pytest.mark.parametrize(
    ("code", "line"), [(SLOW, r"planning tiny, \d+ s so far"), (SILENT, "profiling tiny: tracing, 1 % .*")]
)
def test_work_that_does_not_say_how_far_it_is_prints_lines_too(code, line, tmp_path):
    codec.save(nouns.profile(), tmp_path / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), tmp_path / "profiles" / "cluster.box.json")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "plan"
    assert re.search(f"^asa: {line}$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_a_bar_shows_its_times_at_every_width(width, monkeypatch):
    screen = Screen(file=StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr("asa.cli.console._rich", lambda *, stderr: screen)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Console().progress("training cnn") as report:
        report(0.5, "loss 1.514, 4130 samples/s, 8 % data " + "and more " * 9)
    drawn = screen.file.getvalue()
    assert "ETA -:--:--" in drawn
    assert "…" not in drawn


def test_a_terminal_without_columns_shows_a_word_a_line():
    assert tables.folded("two words", 0) == "two\n    words"


def test_a_table_is_not_squeezed_into_a_narrow_terminal(monkeypatch):
    drawn = StringIO()
    monkeypatch.setattr(
        "asa.cli.console._rich",
        lambda *, stderr: Screen(file=drawn, force_terminal=True, width=30, color_system=None),
    )
    Console().show(cluster_report.overview([("preset", presets.load("a100-nvlink-8"))]))
    assert re.search(r"^a100-nvlink-8 +8 x A100-SXM4-80GB +79.0 GiB +measured", drawn.getvalue(), re.M)


def test_a_variable_that_nearly_names_an_option_is_told(capsys, monkeypatch):
    monkeypatch.setenv("ASA_GPU", "3")
    monkeypatch.setenv("ASA_SOMETHING_ELSE", "3")
    assert entry.run(["config", "show", "plan"]) == 0
    assert one_line(capsys.readouterr().err) == "asa: ASA_GPU sets no option; did you mean ASA_GPUS?\n"


def test_what_cannot_be_is_refused_before_torch_is_imported(elsewhere):
    codec.save(replace(nouns.plan(), device_type="cuda", num_classes=10), elsewhere / "gpus.json")
    codec.save(replace(nouns.plan(), num_classes=10), elsewhere / "plan.json")
    cases = [
        (2, "plan gpt2 --input 3x32x32 --gpus 8 --cluster a100-nvlink-8", "try --tokens"),
        (2, "bench --models gpt2 --input 3x32x32", "try --tokens"),
        (2, "train gpt2 --input 3x32x32", "try --tokens"),
        (2, "bench --study grid --models cnn --tokens 4", "leave out --tokens"),
        (2, "simulate --trace step.txt", "end in .json"),
        (2, "launch slurm -o -", "'-' is no file"),
        (5, "train --device cuda", "no CUDA device is usable here"),
        (5, "bench --study hybrid --device cuda", "no CUDA device is usable here"),
        (5, "train gpus.json", "the plan needs 2 CUDA devices, this machine has 0; train with --device cpu"),
        (5, "verify gpus.json", "the plan needs 2 CUDA devices, this machine has 0; verify with --device cpu"),
        (2, "train plan.json --data nowhere:factory", "no module 'nowhere'"),
        (2, "train plan.json", "cifar100 has 100 classes, the model has 10; make a model of 100"),
        (2, "train cnn --gpus 9999", "the most is"),
        (2, "train cnn --cluster nowhere", "no cluster 'nowhere'"),
        (2, "bench --models cnn --strategies nosuch", "no strategy 'nosuch'"),
        (2, "bench --models cnn --cluster a100-nvlink-8", "a100-nvlink-8 has 8 cuda devices"),
        (2, "bench --models cnn --data digits --classes 3", "digits has 10 classes"),
        (3, "bench --models cnn --data csv:nowhere.csv", "there is no file"),
        (2, "bench --study layers --models nosuch", "no model is called 'nosuch'"),
        (2, "bench --study layers --cluster nowhere", "no cluster 'nowhere'"),
    ]
    code = f"""
import sys
from asa.cli.entry import run
from asa.launch import devices
devices._shows_devices = lambda: False
for code, argv, _ in {cases}:
    print(run(argv.split()), "torch" in sys.modules)
    print("end", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=True)
    outcomes, said = done.stdout.splitlines(), done.stderr.split("end\n")
    for (code, argv, words), outcome, line in zip(cases, outcomes, said, strict=False):
        assert words in one_line(line), argv
        assert outcome == f"{code} False", argv
    assert len(outcomes) == len(cases)


def test_a_folder_in_which_another_run_is_at_work_is_refused_at_once(elsewhere, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    codec.save(nouns.plan(), elsewhere / "plan.json")
    for step in ("", "checkpoints/step_00000003"):
        (elsewhere / "run" / step).mkdir(parents=True, exist_ok=True)
        codec.save(nouns.plan(), elsewhere / "run" / "plan.json")
        with (elsewhere / "run" / "lock").open("w") as other:
            other.write("4711\n")
            other.flush()
            fcntl.flock(other, fcntl.LOCK_EX)
            for more in ((), ("--resume",)):
                assert entry.run(["train", "plan.json", "--out", "run", *more]) == 2
                line = one_line(capsys.readouterr().err)
                assert line == "asa: run is in use by another run (process 4711); choose another --out\n"


def test_a_folder_with_a_run_and_a_tracker_that_is_missing_are_refused_at_once(elsewhere, capsys, monkeypatch):
    codec.save(nouns.plan(), elsewhere / "plan.json")
    (elsewhere / "run" / "checkpoints" / "step_00000003").mkdir(parents=True)
    assert entry.run(["train", "plan.json", "--out", "run"]) == 2
    assert "--resume continues it" in one_line(capsys.readouterr().err)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    assert entry.run(["train", "plan.json", "--track", "mlflow"]) == 5
    assert "asa-parallel[mlflow]" in one_line(capsys.readouterr().err)


def test_lists_and_usage_fit_80_columns(capsys):
    for argv in (["--help"], ["cluster", "--help"]):
        assert entry.run(argv) == 0
        assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80
    found = [("preset", presets.load(name)) for name in presets.names()]
    text = tables.plain([cluster_report.overview(found)], width=80)
    rows = [line.split() for line in text.splitlines()]
    for _, made in found:
        assert any(row[:1] == [made.name] and made.status in row for row in rows), made.name
    legend = tables.plain([cluster_report.legend(found)], width=80)
    for status in {made.status for _, made in found} - {"measured"}:
        assert f"{status}: " in legend


def test_a_profile_that_is_the_newest_of_several_inputs_says_so(elsewhere):
    places.PROFILES.mkdir()
    small = nouns.profile()
    graph = replace(small.graph, input_shape=(3, 64, 64))
    large = replace(small, graph=graph, provenance=replace(small.provenance, created="2999-01-01T00:00:00Z"))
    codec.save(small, places.PROFILES / "small.json")
    codec.save(large, places.PROFILES / "large.json")
    args = Arguments({"gpus": None, "input": None, "tokens": None, "classes": None, "precision": "fp32"}, {})
    found, said = choose.profile(args, Console(), small.model_spec, None, lambda cluster: None)
    assert found == large
    shape = "x".join(map(str, small.graph.input_shape))
    assert said.startswith("profile profiles/large.json, the newest of ")
    assert said.endswith(f"; --input {shape} takes another")


def test_a_profile_that_is_the_newest_of_several_precisions_says_so(elsewhere):
    places.PROFILES.mkdir()
    full = nouns.profile()
    half = replace(full, precision="bf16", provenance=replace(full.provenance, created="2999-01-01T00:00:00Z"))
    codec.save(full, places.PROFILES / "full.json")
    codec.save(half, places.PROFILES / "half.json")
    args = Arguments({"gpus": None, "input": None, "tokens": None, "classes": None, "precision": "fp32"}, {})
    found, said = choose.profile(args, Console(), full.model_spec, None, lambda cluster: None)
    assert found == half
    assert said.endswith("bf16; --precision fp32 takes another")


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("cnn --out cnn --epochs 2", "--out cnn --epochs 2"),
        ("--gpus 2 --out cnn cnn --strategies ddp --no-replan", "--gpus 2 --out cnn --no-replan"),
        ("--loss=cnn cnn --classes=7 --precision bf16", "--loss=cnn"),
    ],
)
def test_the_command_under_a_plan_leaves_out_the_model_and_no_value_that_is_called_like_it(typed, kept):
    (train,) = verbs.verbs("train")
    args = settings.arguments(train, typed.split(), {})
    assert planned_here.words(args, Path("plan.json"), train.options) == ("plan.json", *kept.split())
