"""What import-linter cannot see: no torch where thinking is done, every command documented, every sample true."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import networkx as nx
import nouns
import pytest

import asa
from asa.cli import verbs
from asa.ir import codec
from asa.ir.bench import Bench
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.rehearsal import Rehearsal
from asa.ir.sealed import SealedCheck
from asa.report.text import sealed as report

ROOT = Path(__file__).resolve().parent.parent
VERBS = [verb for word in verbs.VERBS for verb in verbs.verbs(word)]
THINKING = ("asa", "asa.ir.plan", "asa.interfaces.strategy", "asa.strategies", "asa.cost", "asa.planner")
ROOFS = ("asa.simulator", "asa.scheduler", "asa.report", "asa.report.pages.bench", "asa.cli.entry")


def python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_thinking_and_the_command_line_start_without_torch(tmp_path):
    modules = [module for module, _ in verbs.VERBS.values()]
    imports = "".join(f"import {name}\n" for name in (*THINKING, *ROOFS, *modules))
    heavy = "[m for m in ('torch', 'torchvision') if m in sys.modules]"
    assert python(f"import sys\n{imports}print({heavy})", tmp_path).strip() == "[]"


def test_planning_from_a_profile_never_imports_torch(tmp_path):
    codec.save(nouns.profile(), tmp_path / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), tmp_path / "profiles" / "cluster.box.json")
    code = (
        "import sys\nfrom asa.cli.entry import run\n"
        "code = run(['plan', 'profiles/tiny.json', '--gpus', '2', '--cluster', 'box', '--json'])\n"
        "assert code == 0, code\nassert 'torch' not in sys.modules\n"
    )
    data = json.loads(python(code, tmp_path))
    assert [c["name"] for c in data["components"]] == ["stem", "body.0", "head"]
    assert {"ddp", "single"} <= {b["name"] for b in data["baselines"]}


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v.name)
def test_every_command_is_in_the_readme(verb):
    assert f"asa {verb.name}" in (ROOT / "README.md").read_text()


def sample(verb: str) -> str:
    return (ROOT / "docs" / "samples" / f"{verb.replace(' ', '-')}.json").read_text()


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v.name)
def test_every_command_has_a_sample_document(verb):
    assert codec.parse(sample(verb.name), source=verb.name)["schema_version"] == codec.SCHEMA_VERSION


@pytest.mark.parametrize(
    ("verb", "noun"),
    [
        ("profile", Profile),
        ("plan", Plan),
        ("bench", Bench),
        ("train rehearse", Rehearsal),
        ("cluster show", Cluster),
        ("cluster measure", Cluster),
    ],
)
def test_sample_files_are_documents_of_today(verb, noun):
    """A change of a noun that breaks files people have kept fails here (and asks for a new schema version)."""
    assert codec.document(codec.loads(noun, sample(verb), source=verb)) == json.loads(sample(verb))


def test_the_sample_of_a_sealed_check_is_a_document_of_today():
    data = json.loads(sample("bench check-sealed"))
    scores = data.pop("scores")
    made = codec.loads(SealedCheck, json.dumps(data), source="bench check-sealed")
    assert codec.document(made) == data
    assert report.scores(made) == scores


PROMISED = {
    "plan": "components.name components.stage components.data.strategy components.data.degree "
    "components.tensor.strategy "
    "components.tensor.degree components.checkpoint stages.ranks schedule num_microbatches prediction.step_time_s "
    "prediction.compute_s prediction.exposed_communication_s prediction.bubble_s prediction.memory_bytes_per_rank "
    "prediction.samples_per_s certificate.solver certificate.status certificate.lower_bound_s certificate.gap "
    "baselines.name baselines.step_time_s baselines.memory_bytes_max baselines.fits fingerprint",
    "bench": "results.model results.strategy results.ranks results.global_batch results.step_time_s.median "
    "results.step_time_s.p10 results.step_time_s.p90 results.step_time_s.n results.predicted_step_time_s "
    "results.peak_memory_bytes results.predicted_memory_bytes",
    "verify": "equivalent max_rel_error noise_floor worst_tensor dtype learning_rate steps",
    "train": "exit_code status plan_fingerprint checkpoint epochs.measurements.step_time.median epochs.verdict.action",
    "train rehearse": "rank step_s.median compute_s predicted_compute_s peak_memory_bytes predicted_memory_bytes",
    "bench check-sealed": "machines cells.predicted_s cells.measured.median cells.predicted_place scores.coverage_90",
    "explain": "plan_fingerprint components.name components.alternative binding",
    "simulate": "step_time_s events.name events.start_s",
    "doctor": "ok checks.name checks.ok checks.fix",
    "cluster list": "clusters.name clusters.status clusters.source",
    "config show": "settings.name settings.value settings.from",
}


@pytest.mark.parametrize(("verb", "path"), [(v, p) for v, paths in PROMISED.items() for p in paths.split()])
def test_documents_have_the_fields_that_other_tools_rely_on(verb, path):
    at = json.loads(sample(verb))
    for key in path.split("."):
        assert key in at, f"{verb} has no {path}"
        at = at[key]
        while isinstance(at, list) and at and isinstance(at[0], dict):
            at = at[0]


def test_links_in_the_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_files_that_the_pages_name_are_there():
    folders = (ROOT / "asa", ROOT / "benchmarks", ROOT / "planner_tests")
    files = [f"/{p.relative_to(ROOT)}" for folder in folders for p in folder.rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [(page.name, name) for page in pages for name in re.findall(r"`([\w/]+\.py)\b", page.read_text())]
    assert len(named) > 50
    assert [where for where in named if not any(file.endswith(f"/{where[1]}") for file in files)] == []


def test_the_page_of_commands_is_made_of_their_options():
    spec = importlib.util.spec_from_file_location("make_cli_page", ROOT / "benchmarks" / "make_cli_page.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run python benchmarks/make_cli_page.py"


def test_one_version_is_stated_everywhere():
    assert re.search(rf"^version: {re.escape(asa.__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## {asa.__version__} - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings():
    for path in sorted((ROOT / "asa").rglob("*.py")):
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield path, node.lineno, node.value.value


def test_docstrings_begin_with_what_is_returned_or_done():
    found = [f"{p}:{n} {t[:40]!r}" for p, n, t in docstrings() if re.match(r"(Of|The same|And|Those|As)\b", t)]
    assert not found, "\n".join(found)


def names_in(tree: ast.AST) -> set[str]:
    """What a file defines, assigns or imports, in whatever scope."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=n) | ast.AsyncFunctionDef(name=n) | ast.ClassDef(name=n) | ast.alias(name=n):
                names.add(getattr(node, "asname", None) or n.split(".")[0])
            case ast.Name(id=n, ctx=ast.Store()) | ast.Attribute(attr=n, ctx=ast.Store()):
                names.add(n)
    return names


def test_cross_references_name_something():
    """Roles such as ``:func:`name``` in docstrings and comments; names of other packages are not looked up."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "asa").rglob("*.py")}
    known = {name.removesuffix(".__init__"): names_in(tree(p)) for name, p in files.items()}
    anywhere = set().union(*known.values())

    def exists(here: str, target: str) -> bool:
        if not target.startswith("asa."):
            first, *rest = target.split(".")
            return first in known[here] and set(rest) <= anywhere
        module = target
        while module not in known:
            module = module.rpartition(".")[0]
        rest = target.removeprefix(module).split(".")[1:]
        return not rest or (rest[0] in known[module] and set(rest) <= anywhere)

    lost = [
        f"{p.relative_to(ROOT)}: {target}"
        for name, p in files.items()
        for target in re.findall(r":(?:meth|func|mod|class|data|attr|exc):`~?([\w.]+)`", p.read_text())
        if target.split(".")[0] not in ("torch", "numpy", *sys.stdlib_module_names)
        and not exists(name.removesuffix(".__init__"), target)
    ]
    assert not lost, "\n".join(lost)


def test_class_names_are_unique_where_plans_are_priced_and_searched():
    found = {}
    for room in ("planner", "cost"):
        for path in sorted((ROOT / "asa" / room).rglob("*.py")):
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice


ROOMS = {"planner": (13_070, 64), "cost": (4_764, 37)}
"""Most lines and files of a room: what makes it larger takes something out, too."""


@pytest.mark.parametrize("room", list(ROOMS))
def test_rooms_keep_to_their_lines(room):
    files = sorted((ROOT / "asa" / room).rglob("*.py"))
    lines = sum(len(f.read_text().splitlines()) for f in files)
    assert (lines <= ROOMS[room][0], len(files) <= ROOMS[room][1]) == (True, True), (room, lines, len(files))


def test_no_file_needs_another_that_needs_it():
    """Imports for types and inside functions count; the package's own facade, ``asa/__init__.py``, does not."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "asa").rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items() if name != "asa.__init__"}
    needs = nx.DiGraph()
    for name, path in files.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = {f"{node.module}.{a.name}" for a in node.names} & files.keys() or {node.module}
            elif isinstance(node, ast.Import):
                wanted = {a.name for a in node.names}
            else:
                continue
            needs.add_edges_from((name, w) for w in wanted & files.keys() - {name})
    assert len(needs) > 400
    assert [sorted(c) for c in nx.strongly_connected_components(needs) if len(c) > 1] == []


MEANT = {"_apply", "_fill_text", "_load_from_state_dict", "_split_lines"}
"""Private methods of ``torch.nn.Module`` and of argparse's formatter that a class replaces on purpose."""


@cache
def _private_names(kind: type) -> frozenset[str]:
    """Private methods that the text of a class defines, and private attributes that it assigns to ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # written in C
        return frozenset()
    stored = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
              and isinstance(n.value, ast.Name) and n.value.id == "self"}  # fmt: skip
    names = stored | {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    return frozenset(n for n in names if n.startswith("_") and not n.startswith("__"))


def test_no_class_uses_a_private_name_of_a_base_class_of_another_package() -> None:
    """Such as ``_handle``, which ``threading.Thread`` has used for itself since Python 3.13."""
    shared = []
    for found in pkgutil.walk_packages(asa.__path__, "asa."):
        module = importlib.import_module(found.name) if not found.name.endswith("__main__") else asa
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == found.name:
                foreign = [b for b in kind.__mro__ if b.__module__.split(".")[0] not in ("asa", "builtins")]
                theirs = frozenset().union(*map(_private_names, foreign)) - MEANT
                both = theirs & _private_names(kind) if theirs else theirs
                shared += [f"{found.name}.{kind.__name__}.{name}" for name in sorted(both)]
    assert shared == []
