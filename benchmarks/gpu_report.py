"""What ``make gpu`` found, on a page, and against the sealed predictions.

    python benchmarks/gpu_report.py RECORD [--sealed DIR]

scores a ``record.jsonl`` that was sent back: sealed predictions of the same kind of machine that were measured, and
those that plans from the profiles in it put otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WITHIN = 0.05
"""How far the sum of components may be from the whole model, of its time."""
PROFILE_S = 60.0
"""What a profile may take, in seconds."""
AIM = 0.98
"""Of the tuned reference's speed."""
SEALED = Path(__file__).with_name("sealed")
Found = dict[str, Any]


def answers(record: Path) -> dict[str, Found]:
    """The last answer to each command; a line that was cut off by a kill is left out."""
    found = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["name"]] = entry
    return found


def failed(found: Found) -> bool:
    """Whether a command failed: that nothing fits (4) is an answer where one asks how much does."""
    return found["exit_code"] not in ((0, 4) if found["name"].startswith("fits ") else (0,))


def report(record: Path, pieces: Iterable[str], score: str, sealed: Path) -> str:
    """The verdict: what failed, and how far predictions were off."""
    found = answers(record)
    wrong = [f for f in found.values() if failed(f)]
    lines = ["# What the GPUs said", "", f"{len(found)} commands, {len(wrong)} failed.", *_verdict(found), ""]
    for piece in pieces:
        own = [f for f in found.values() if f["piece"] == piece]
        lines += [f"## {piece}", "", *([line for f in own for line in _told(f, found)] or ["not run"]), ""]
    page = record.with_name("gpu-report.md")
    lines += ["## To send back", "", f"Attach `{record}` and `{page}`. Whoever has them scores them with:", ""]
    return "\n".join([*lines, f"    {score}", "", *scores(found, sealed), ""])


def _verdict(found: dict[str, Found]) -> list[str]:
    """Each aim with how many cells reach it, in one line; nothing of what was not run."""
    good = {name: f["answer"] for name, f in found.items() if f.get("answer") and not failed(f)}
    lines = [f"Device: {card}." for card in sorted({a["device"]["name"] for a in _of(good, "profile ").values()})]
    if plain := [_off(a) for a in _of(good, "profile ").values() if a["whole"] and not a.get("compiled")]:
        near = sum(abs(v) <= WITHIN for v in plain)
        lines.append(f"Components within {WITHIN:.0%} of the whole model: {near} of {len(plain)} profiles.")
    if took := [f["seconds"] for name, f in found.items() if name.startswith("profile ") and not failed(f)]:
        soon = sum(seconds <= PROFILE_S for seconds in took)
        lines.append(f"Profiles in {PROFILE_S:.0f} s: {soon} of {len(took)}, {max(took):.0f} s at most.")
    if doubtful := sum(bool(a["provenance"].get("disturbed")) for a in _of(good, "profile ").values()):
        lines.append(f"Profiles that were disturbed while they were measured, and are not trusted: {doubtful}.")
    for what, words in (("memory ", "Memory of plans for one GPU"), ("rehearse ", "Memory of ranks of eight")):
        if seen := [a["predicted_memory_bytes"] / a["peak_memory_bytes"] - 1 for a in _of(good, what).values()]:
            median, under = statistics.median(map(abs, seen)), sum(v < 0 for v in seen)
            lines.append(
                f"{words}: {len(seen)} cells, {median:.1%} off at the median, {max(map(abs, seen)):.1%} at worst, "
                f"{under} under-predicted."
            )
    ratios = [r for name in _of(good, "speed ") if (r := _speed(name, good)) is not None]
    if ratios:
        near = sum(r >= AIM for r in ratios)
        lines.append(
            f"At least {AIM} of the tuned reference's speed: {near} of {len(ratios)}, {min(ratios):.2f} at worst."
        )
    if checked := _of(good, "verify "):
        same = sum(a["equivalent"] for a in checked.values())
        lines.append(f"Plans that train as one device does: {same} of {len(checked)}.")
    return [text for line in lines for text in ("", line)]


def _of(good: dict[str, Any], word: str) -> dict[str, Any]:
    return {name: answer for name, answer in good.items() if name.startswith(word)}


def _off(profile: Any) -> float:
    """How far the sum of components is from the whole at worst, of its time."""
    return max((w["components_s"] / w["whole"]["median"] - 1 for w in profile["whole"]), key=abs, default=0.0)


def _speed(name: str, good: dict[str, Any]) -> float | None:
    """Speed over that of the tuned reference; None without one."""
    theirs = good.get(f"reference {name.removeprefix('speed ')}")
    return None if theirs is None else float(theirs["step_s"] / good[name]["step_s"]["median"])


def _told(found: Found, every: dict[str, Found]) -> list[str]:
    name, answer = found["name"], found.get("answer") or {}
    if failed(found):
        last = (found.get("error") or found.get("said") or "").strip().splitlines()[-1:]
        return [f"- {name}: FAILED with {found['exit_code']}: {''.join(last)}"]
    if name.startswith("profile "):
        worst = _off(answer)
        doubt = answer["provenance"].get("disturbed", "")
        good = "ok" if abs(worst) <= WITHIN else "TOO FAR OFF"
        if answer.get("compiled"):  # the whole is compiled as one: what that would gain is a finding
            good = f"compiling took {answer['compile_s']:.0f} s"
        doubt = f"; {doubt}" if doubt else ""
        if found["seconds"] > PROFILE_S:
            doubt += f"; it took {found['seconds']:.0f} s, TOO LONG"
        return [f"- {name}: components are {100 * worst:+.1f} % off the whole at worst, {good}{doubt}"]
    if name.startswith(("memory ", "rehearse ", "full ")):
        promised, seen = answer["predicted_memory_bytes"], answer["peak_memory_bytes"]
        mib, off = 2**20, promised / seen - 1
        under = ", UNDER-PREDICTED" if off < 0 else ""
        return [f"- {name}: memory {promised / mib:.0f} MiB predicted, {seen / mib:.0f} measured ({off:+.1%}{under})"]
    if name.startswith("fits "):
        return [] if found["exit_code"] == 0 else [f"- {name}: does not fit"]
    if name.startswith("speed "):
        theirs = every.get(f"reference {name.removeprefix('speed ')}", {}).get("answer")
        ours = answer["step_s"]["median"]
        if not theirs:
            return [f"- {name}: {1e3 * ours:.3f} ms a step, no reference"]
        ratio = theirs["step_s"] / ours
        good = "ok" if ratio >= AIM else f"below {AIM}"
        return [f"- {name}: {1e3 * ours:.3f} ms a step, {ratio:.2f} of the tuned reference's speed, {good}"]
    if name.startswith("bench "):
        return [f"- {name}: {line}" for line in _regret(answer["results"])]
    if name.startswith("study "):
        return [f"- {name}: {1e3 * answer['prediction']['step_time_s']:.2f} ms a step, from what was measured here"]
    if name.startswith("verify "):
        return [f"- {name}: {'equivalent' if answer['equivalent'] else 'NOT EQUIVALENT'}"]
    return [] if name.startswith(("plan ", "reference ")) else [f"- {name}: ok in {found['seconds']:.0f} s"]


def _regret(results: Sequence[Found]) -> list[str]:
    """What the planner's answer cost against the best that was run, and how far predictions were off."""
    timed = {r["strategy"]: r["step_time_s"]["median"] for r in results if r["step_time_s"]}
    off = [r["predicted_step_time_s"] / timed[r["strategy"]] - 1 for r in results if r["strategy"] in timed]
    if not timed:
        return ["nothing was measured"]
    best = min(timed, key=timed.__getitem__)
    lines = [f"{len(timed)} strategies; predictions {100 * statistics.median(map(abs, off)):.0f} % off at the median"]
    if "asa" in timed:
        lines.append(f"regret {timed['asa'] / timed[best] - 1:.1%}, the fastest is {best}")
    return lines


def scores(found: dict[str, Found], folder: Path) -> list[str]:
    """Sealed predictions, every hash checked, beside what was measured and what new profiles say instead."""
    from asa.cost.machine.nearest import same_gpu
    from asa.ir.sealed import newest, read

    found = {name: entry for name, entry in found.items() if not failed(entry)}  # an error is a document, too
    every = [s for path in sorted(folder.glob("*.jsonl")) for s in read(path)]
    seals, known = newest(every), {s.sha256 for s in every}
    lines: list[str] = []
    for entry in found.values():
        for cell in (entry.get("answer") or {}).get("cells", ()) if entry["name"] == "sealed" else ():
            what = f"{cell['model']} {cell['strategy']} on {cell['machine']}"
            if cell["sha256"] not in known:
                lines.append(f"- {what}: no such prediction is sealed here")
            elif cell["measured"]:
                off = cell["predicted_s"] / cell["measured"]["median"] - 1
                inside = cell["low_s"] <= cell["measured"]["median"] <= cell["high_s"]
                lines.append(f"- {what}: sealed {off:+.1%} off, {'inside' if inside else 'outside'} its interval")
            else:
                lines.append(f"- {what}: not measured: {cell['why_not']}")
    plans = [f["answer"] for f in found.values() if f["name"].startswith("study ") and f.get("answer")]
    cards = {
        f["answer"]["device"]["name"] for f in found.values() if f["name"].startswith("profile ") and f.get("answer")
    }
    for seal in seals:
        p = seal.claim.plan
        for new in plans if any(same_gpu(seal.claim.device_name, card) for card in cards) else ():
            same = (p.model_spec, list(p.input_shape), p.num_classes, p.global_batch, p.precision, p.gpus, p.cluster)
            other = [new[k] for k in ("model_spec", "input_shape", "num_classes", "global_batch", "precision", "gpus",
                                      "cluster")]  # fmt: skip
            if list(same) == other and seal.claim.strategy == new["strategy"]:
                ratio = p.prediction.step_time_s / new["prediction"]["step_time_s"] - 1
                lines.append(f"- {p.model_spec} {seal.claim.strategy} on {seal.claim.machine}: sealed {ratio:+.1%} off "
                             "what the new profile foresees")  # fmt: skip
    lines += _anew(found, folder)
    head = ["## Against the sealed predictions", ""]
    return [*head, *(lines or [f"none of {len(seals)} sealed predictions is of what was measured here"])]


def _anew(found: dict[str, Found], folder: Path) -> list[str]:
    """Predictions that were made anew there, every hash checked behind those that are sealed here."""
    from asa.errors import InvalidInputError
    from asa.ir.sealed import newest, read

    lines = []
    for machine, made in ((found.get("sealed anew", {}).get("answer") or {}).get("sealed") or {}).items():
        before = folder / f"{machine}.jsonl"
        with tempfile.TemporaryDirectory() as scratch:
            chain = Path(scratch) / before.name
            chain.write_text((before.read_text() if before.is_file() else "") + "".join(made))
            try:
                seals = read(chain)
            except InvalidInputError as error:
                lines.append(f"- {machine}: predictions made anew do not follow what is sealed here: {error}")
                continue
        old = {s.claim.key: s for s in newest(seals[: len(seals) - len(made)])}
        lines.append(f"- {machine}: {len(made)} predictions made anew from profiles of this card, every hash holds")
        for seal in seals[len(seals) - len(made) :]:
            new, p = seal.claim.plan.prediction.step_time_s, seal.claim.plan
            if was := old.get(seal.claim.key):
                ratio = was.claim.plan.prediction.step_time_s / new - 1
                lines.append(f"- {p.model_spec} {seal.claim.strategy} on {machine}: {1e3 * new:.2f} ms a step foreseen "
                             f"now, the one sealed before is {ratio:+.1%} off it")  # fmt: skip
    return lines


def main() -> None:
    """Print the score of a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--sealed", type=Path, default=SEALED)
    args = parser.parse_args()
    print("\n".join(scores(answers(args.record), args.sealed)))


if __name__ == "__main__":
    main()
