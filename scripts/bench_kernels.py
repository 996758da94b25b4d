"""Check and time the Pallas attention kernels on one H200.

    PYTHONPATH=. python scripts/bench_kernels.py

Sections time, wall clock over many queued calls (kernel_measuring.py), and check each row against float64 as well;
"check" sections run random ragged batches. Each section is a process (checks are several), so that a kernel that hangs
or breaks the CUDA context takes nothing else with it. All start and compile at once; when all have, they measure in
turn. A row that fails is recorded as such. Sections that do not run keep their rows in the output file. With
JAX_PLATFORMS=cpu it is a rehearsal in the interpreter at tiny shapes.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import kernel_shapes as shapes
import records
from kernel_checks import Check, CheckShape
from kernel_decode_rows import decode_row, write_and_decode_row
from kernel_measuring import Measurement, Row
from kernel_rows import mixed_row, prefill_row, work_row, write_row

from jaxvllm.compile_cache import compiler_options
from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape
from pallas_kernels.tuning import H200


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
      expected_s: what it takes on an H200 once it has compiled, which takes all of them together 30 to 60 s.
      limit_s: after which it is given up.
      processes: that share it; more than one for checks only.
      is_experiment: runs only if it is asked for.
    """

    expected_s: int
    limit_s: int
    processes: int = 1
    is_experiment: bool = False


SECTIONS = {
    "decode": Section(15, 60),
    "prefill": Section(7, 40),
    "mixed": Section(6, 40),
    "rope": Section(6, 40),
    "breadth": Section(30, 80),
    "groups": Section(30, 80),
    "check": Section(20, 90, processes=3),
    "check breadth": Section(20, 90, processes=3),
    "cuts": Section(20, 90, is_experiment=True),
}


GEMMA: dict[str, Any] = {"sliding_window": 300, "soft_cap": 50.0}


def plan_rows(section: str) -> Iterable[partial[Measurement]]:
    """What a section times, the most wanted first."""
    if section == "decode":
        rows = [partial(decode_row, shape) for shape in shapes.DECODE_SHAPES]
        return [*(partial(write_and_decode_row, shape) for shape in shapes.WRITE_AND_DECODE_SHAPES), *rows]
    if section == "cuts":
        return [partial(decode_row, shape) for shape in shapes.CUT_SHAPES]
    if section == "rope":
        return [partial(write_row, num_tokens) for num_tokens in shapes.WRITE_TOKENS]
    if section == "prefill":
        return [partial(prefill_row, shape) for shape in shapes.PREFILL_SHAPES]
    if section == "mixed":
        return [partial(mixed_row, shapes.MIXED_STEP), *(partial(work_row, *sizes) for sizes in shapes.WORK_SIZES)]
    pairs = {"breadth": shapes.OPTION_SHAPES, "groups": shapes.GROUP_SHAPES}.get(section, ())
    decodes = [partial(decode_row, decode) for decode, _ in pairs]
    return [*decodes, *(partial(prefill_row, prefill) for _, prefill in pairs)]


def plan_checks(section: str) -> list[tuple[CheckShape, int]]:
    """Shapes to check and the number of batches: 178 of the usual ones, and 110 over all that models may want."""
    if not shapes.ON_CARD:
        tiny = CheckShape(HeadShape("tiny", 2, 1, 64), "mixed", 24, 3, max_len=60, num_slots=400)
        decode = CheckShape(HeadShape("tiny", 2, 1, 128), "decode", 3, 3, max_len=60, num_slots=400)
        return [(tiny, 2), (decode, 2)] if section == "check" else []
    heads = {shape.name: shape for shape in HEAD_SHAPES}
    qwen3, llama, smollm2, qwen2 = (heads[n] for n in ("qwen3-0.6b", "llama-3.1-8b", "smollm2-135m", "qwen2-7b"))
    if section == "check":
        mixed = [(qwen3, 16), (llama, 16), (smollm2, 16), (qwen2, 16)]
        mixed += [(HeadShape("1 of 128", 4, 4, 128), 32), (HeadShape("8 of 64", 16, 2, 64), 64)]
        rows = [(CheckShape(h, "mixed", 1024, 32, block_size), 12) for h, block_size in mixed]
        rows.append((CheckShape(qwen3, "decode", 64, 64), 12))
        rows.append((CheckShape(qwen2, "decode", 64, 64, 128), 10))
        rows.append((CheckShape(smollm2, "mixed", 16, 8), 6))
        rows.append((CheckShape(qwen3, "decode", 16, 16), 10))
        rows.append((CheckShape(llama, "mixed", 512, 16), 10))
        # Few rows, which one kernel writes and attends.
        rows.append((CheckShape(smollm2, "decode", 8, 8), 6))
        rows.append((CheckShape(qwen3, "decode", 8, 8), 12))
        rows.append((CheckShape(llama, "decode", 5, 5, 32), 10))
        rows.append((CheckShape(llama, "decode", 8, 8, cache_dtype=shapes.FP8, **GEMMA, has_sinks=True), 10))
        rows.append((CheckShape(HeadShape("1 of 128", 4, 4, 128), "decode", 8, 8, dtype="float16"), 10))
        rows.append((CheckShape(HeadShape("gemma", 8, 4, 256), "decode", 8, 8, **GEMMA), 10))
        return rows
    if section != "check breadth":
        return []
    shapes_of_options = [
        (llama, {"cache_dtype": shapes.FP8}),
        (smollm2, {"cache_dtype": shapes.FP8, "block_size": 32, **GEMMA, "has_sinks": True}),
        (HeadShape("gemma", 8, 4, 256), {"cache_dtype": shapes.FP8}),
        (HeadShape("gemma", 8, 4, 256), GEMMA),
        (llama, {"sliding_window": 100, "has_sinks": True}),
        (HeadShape("group 3", 9, 3, 128), {"has_sinks": True, "block_size": 64}),
        (qwen3, {"dtype": "float16", "soft_cap": 20.0}),
        (HeadShape("phi-2", 8, 8, 80), {}),
        (HeadShape("group 5", 5, 1, 96), {"dtype": "float16"}),
        (HeadShape("group 12", 24, 2, 128), {"has_sinks": True}),
        (HeadShape("group 16", 32, 2, 128), {"cache_dtype": shapes.FP8, "block_size": 128}),
    ]
    return [(CheckShape(h, "mixed", 512, 16, **options), 10) for h, options in shapes_of_options]


class Results:
    """The rows of one process so far, written out after each."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, list[Row]] = {"checks": [], "rows": []}

    def add(self, kind: str, row: Row) -> None:
        self.rows[kind].append(row)
        self.path.write_text(json.dumps(self.rows))
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def run_checks(plan: list[tuple[int, tuple[CheckShape, int]]], jobs: list[Future], results: Results) -> None:
    """`plan`: seed, and the shape with its number of batches."""
    for job, (seed, (shape, num_batches)) in zip(jobs, plan, strict=True):
        start = time.monotonic()
        try:
            row = job.result().run(num_batches, seed)
        except Exception as error:  # one broken shape must not hide the others
            traceback.print_exc()
            row = {"check": shape.name, "batches": num_batches, "failed": failure(error)}
        results.add("checks", {"seconds": round(time.monotonic() - start, 1), **row})


def start_timings(section: str, results: Results, only: str) -> list[tuple[Measurement, dict[str, Future]]]:
    """Lower one after the other, compile in threads; returns when all is compiled."""
    options = compiler_options("gpu") if shapes.ON_CARD else None
    jobs: list[tuple[Measurement, dict[str, Future]]] = []
    with ThreadPoolExecutor(8) as pool:
        for make in plan_rows(section):
            measurement = make()
            if only not in measurement.name:
                continue
            try:
                lowered = {name: program.lower() for name, program in measurement.programs.items()}
                compiling = {name: pool.submit(program.compile, options) for name, program in lowered.items()}
                jobs.append((measurement, compiling))
            except Exception as error:
                traceback.print_exc()
                results.add("rows", {"shape": measurement.name, "failed": failure(error)})
    return jobs


def run_timings(jobs: list[tuple[Measurement, dict[str, Future]]], results: Results) -> None:
    for measurement, compiling in jobs:
        try:
            results.add("rows", measurement.measure({name: job.result() for name, job in compiling.items()}))
        except Exception as error:
            traceback.print_exc()
            results.add("rows", {"shape": measurement.name, "failed": failure(error)})


def run_child(args: argparse.Namespace) -> None:
    """One process of a section: says "ready" when all is compiled, and goes on when its input says so."""
    results = Results(args.out)
    start = time.monotonic()
    jax.devices()
    seconds_to_device = time.monotonic() - start
    part, parts = args.part
    plan = list(enumerate(plan_checks(args.section)))[part::parts]
    timings = start_timings(args.section, results, args.only) if part == 0 else []
    with ThreadPoolExecutor(4) as pool:
        checks = [pool.submit(Check.compile, shape, seed) for seed, (shape, _) in plan]
        wait(checks)
    ready = time.monotonic() - start
    print(f"{args.section}: device after {seconds_to_device:.1f} s, ready after {ready:.1f} s", flush=True)
    args.out.with_suffix(".ready").touch()
    sys.stdin.readline()
    run_timings(timings, results)
    run_checks(plan, checks, results)


@dataclass
class Child:
    """A process of a section and the file of its rows."""

    process: subprocess.Popen
    out: Path

    @classmethod
    def start(cls, section: str, part: int, rank: int, memory: float, args: argparse.Namespace) -> "Child":
        """Start compiling; those of lower rank come first. `memory`: its share of the card's."""
        name = section.replace(" ", "_")
        out = args.out.with_name(f"{args.out.stem}.{name}.{part}.part")
        for old in (out, out.with_suffix(".ready")):
            old.unlink(missing_ok=True)
        nice = ["nice", "-n", str(rank)] if shutil.which("nice") else []
        command = [*nice, sys.executable, __file__, "--section", section, "--out", str(out), "--only", args.only]
        command += ["--part", str(part), str(SECTIONS[section].processes)]
        environment = os.environ | {"XLA_CLIENT_MEM_FRACTION": f"{memory:.3f}"}
        return cls(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE), out)

    def wait_until_ready(self, deadline: float) -> None:
        """Return when it is ready, or has ended, or the time is over."""
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.out.with_suffix(".ready").exists():
                return
            time.sleep(0.1)

    def go(self) -> None:
        """Let it measure."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()

    def finish(self, deadline: float) -> str:
        """Wait, kill it at the deadline; how it ended."""
        try:
            code = self.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "timed out"
        return "done" if code == 0 else f"exit {code}"

    def rows(self) -> dict[str, list[Row]]:
        """What it found so far; removes its files."""
        found = json.loads(self.out.read_text()) if self.out.exists() else {}
        for file in (self.out, self.out.with_suffix(".ready")):
            file.unlink(missing_ok=True)
        return found


def summarise(data: dict[str, Any]) -> dict[str, Any]:
    """What the rows come to."""
    rows, checks = data["rows"], data["checks"]
    summary: dict[str, Any] = {}
    if checks:
        passed, total = (sum(row.get(key, 0) for row in checks) for key in ("passed", "batches"))
        summary["batches"] = f"{passed} of {total} right"
    wrong = [row["shape"] for row in rows if "failed" in row or not row.get("is_right", True)]
    summary["rows"] = f"{len(rows) - len(wrong)} of {len(rows)} right"
    if wrong:
        summary["wrong"] = wrong
    for kernel in ("decode", "prefill"):
        ratios = [row["fa3_ratio"] for row in rows if row.get("kernel") == kernel and "fa3_ratio" in row]
        if ratios:
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            summary[f"{kernel} / FlashAttention-3"] = {"geometric_mean": round(mean, 3), "least": least}
    us = {
        (row.get("kernel"), row["shape"]): row["us"] for row in rows if row.get("section") == "breadth" and "us" in row
    }
    eight = {shape: us["decode", shape.partition(",")[0]] / t for (kernel, shape), t in us.items()
             if kernel == "decode" and shape.endswith(f", {shapes.FP8} cache")}  # fmt: skip
    if eight:
        summary["8-bit cache, speed of decode against 16 bits"] = {name: round(x, 2) for name, x in eight.items()}
    for row in rows:
        if "of_parts" in row:
            summary[f"mixed {row['shape']}, time / parts"] = row["of_parts"]
    traced = {row["shape"]: row for row in rows if "xla_device_us" in row}
    if traced:
        of_xla = {name: round(row["device_us"] / row["xla_device_us"], 3) for name, row in traced.items()}
        summary["rope and kv write, kernel time / XLA's"] = of_xla
    return summary


def run_all(args: argparse.Namespace) -> int:
    """Each section in processes of its own; this one never touches the device."""
    data: dict[str, Any] = {"sections": {}, "checks": [], "rows": []}
    if args.out.exists():
        old = json.loads(args.out.read_text())
        # Rows of a file from before sections were kept apart are nobody's.
        data = {kind: old[kind] for kind in data} if "summary" in old else data
    data["config"] = asdict(H200)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    usual = [name for name, section in SECTIONS.items() if not section.is_experiment]
    names = args.sections.split(",") if args.sections else usual
    end = time.monotonic() + args.budget_s
    memory = 0.9 / sum(SECTIONS[name].processes for name in names)
    children = {
        name: [Child.start(name, part, rank, memory, args) for part in range(SECTIONS[name].processes)]
        for rank, name in enumerate(names)
    }
    # Beside what compiles, short kernels would be launched late: 8 x 1024 query tokens took 203 us instead of 170.
    for child in itertools.chain(*children.values()):
        child.wait_until_ready(end)
    for name in names:
        start = time.monotonic()
        for child in children[name]:
            child.go()
        limit = SECTIONS[name].limit_s if shapes.ON_CARD else 900
        ends = {child.finish(min(start + limit, end)) for child in children[name]}
        found = [child.rows() for child in children[name]]
        seconds = round(time.monotonic() - start, 1)
        print(f"== {name}: {', '.join(sorted(ends))}, {seconds} s", flush=True)
        commit = records.provenance()["commit"]
        data["sections"][name] = {"commit": commit, "end": ", ".join(sorted(ends)), "seconds": seconds}
        for kind in ("checks", "rows"):
            new = [{"section": name, **row} for rows in found for row in rows.get(kind, [])]
            data[kind] = [row for row in data[kind] if row["section"] != name] + new
        data["summary"] = summarise(data)
        records.write(args.out, data)
    for key, value in data["summary"].items():
        print(f"{key}: {value}")
    right = "wrong" not in data["summary"] and all(row.get("passed") == row["batches"] for row in data["checks"])
    return 0 if right else 1


def main() -> int:
    names = ", ".join(f"{name} ({section.expected_s} s)" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200" / "kernels.json")
    parser.add_argument("--sections", default="", help=f"comma separated, of {names}; all but cuts by default")
    parser.add_argument("--only", default="", help="time only rows whose name contains this")
    parser.add_argument("--budget-s", type=float, default=570, help="nothing runs for longer than this")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        run_child(args)
        return 0
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
