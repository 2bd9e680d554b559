"""Questions to NVML are those that the installed pynvml knows, on real GPUs and on the stand-in's."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

ROOT = Path(__file__).resolve().parent.parent
ASKING = sorted(p for p in (ROOT / "asa").rglob("*.py") if "nvml" in p.read_text())
FAKES = [ROOT / "planner_tests" / name for name in ("test_devices.py", "test_doctor.py")]
STAND_IN = ROOT / "planner_tests" / "standin" / "nvml.c"


def asked(file: Path) -> Iterator[tuple[str, int]]:
    """The name and the number of arguments of each question that ``file`` asks."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        given = len(node.args) + sum(isinstance(a, ast.Starred) for a in node.args)  # what is starred is a pair
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith("nvml"):
            yield node.func.attr, given
        elif ast.unparse(node.func) in ("query", "nvml.query"):
            named = next(i for i, a in enumerate(node.args) if isinstance(a, ast.Constant) and "nvml" in str(a.value))
            yield ast.literal_eval(node.args[named]), given - named - 1


def test_every_question_is_one_that_pynvml_knows_with_as_many_arguments() -> None:
    """A wrong name would never be noticed: what a GPU does not support is unknown, and so is what does not exist."""
    questions = {question for file in ASKING for question in asked(file)}
    assert len(questions) > 15
    for name, count in questions:
        inspect.signature(getattr(pynvml, name)).bind(*range(count))


def test_every_constant_is_one_of_pynvml() -> None:
    named = {name for file in ASKING for name in re.findall(r"\bn\.(NVML_\w+)", file.read_text())}
    assert len(named) >= 3
    assert [name for name in named if not hasattr(pynvml, name)] == []


def test_no_setting_of_a_card_is_changed() -> None:
    names = {name for file in ASKING for name, _ in asked(file)}
    assert [name for name in names if not re.match("nvml(Init|Shutdown|DeviceGet)", name)] == []


@pytest.mark.parametrize("file", FAKES, ids=lambda p: p.stem)
def test_fakes_answer_no_question_that_is_not_there(file: Path) -> None:
    names = set(re.findall(r"nvmlDeviceGet\w+", file.read_text()))
    assert len(names) >= 5
    assert [name for name in names if not hasattr(pynvml, name)] == []


def called() -> dict[str, int]:
    """The number of arguments of each function of the library as pynvml calls it."""
    text, found = inspect.getsource(pynvml), dict[str, int]()
    for function in (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        counts = {len(node.args) for node in calls if ast.unparse(node.func) == "fn"}
        for node in calls:
            if ast.unparse(node.func) == "_nvmlGetFunctionPointer" and len(counts) == 1:
                found[str(ast.literal_eval(node.args[0]))] = min(counts)
    return found


def test_the_stand_in_takes_what_pynvml_hands_it() -> None:
    """There is no header of NVML to compile it against."""
    library = {
        name: 0 if given in ("", "void") else given.count(",") + 1
        for name, given in re.findall(r"^(?:result|const char \*) ?(nvml\w+)\(([^)]*)\)", STAND_IN.read_text(), re.M)
    }
    known = called()
    assert len(library) > 30
    checked = {name: count for name, count in library.items() if name in known}
    assert checked == {name: known[name] for name in checked}
    assert library.keys() - known.keys() <= TORCH, library.keys() - known.keys()


TORCH = {"nvmlInit", "nvmlInit_v2", "nvmlDeviceGetComputeRunningProcesses"}
"""What torch asks the library for under names that pynvml does not use."""

STRUCTURES = {"memory": "c_nvmlMemory_t", "rates": "c_nvmlUtilization_t", "process": "c_nvmlProcessInfo_v2_t"}
"""The structures of the stand-in, and those of pynvml that it fills."""


def test_structures_of_the_stand_in_are_laid_out_as_pynvml_reads_them() -> None:
    declared = re.findall(r"^struct (\w+) \{ (.*) \};$", STAND_IN.read_text(), re.M)
    assert {name for name, _ in declared} == STRUCTURES.keys()
    for name, fields in declared:
        types = [
            getattr(ctypes, "c_" + {"unsigned int": "uint", "unsigned long long": "ulonglong"}[kind])
            for kind, names in re.findall(r"(unsigned (?:int|long long)) ([\w, ]+);", fields)
            for _ in names.split(",")
        ]
        assert types == [kind for _, kind, *_ in getattr(pynvml, STRUCTURES[name])._fields_], name
