"""Time npattn beside its peers and beside the machine's limits, and write the table.

    python benchmarks/run.py [--quick] [--suite attention] [--only TEXT] [--rounds N] [--write]

Every contender runs in a process of its own; all are prepared for a workload, checked, and then take turns,
so that whatever else the machine does falls on all of them; the best of all turns counts. A contender whose
result is wrong gets no time. ``--write`` replaces the tables in docs/performance.md between its markers.
A new suite is a module in benchmarks/suites (see attention.py there).
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))
PAGE = ROOT / "docs" / "performance.md"
LIBRARIES = {"PyTorch": "torch", "onnxruntime": "onnxruntime", "JAX": "jax", "PyG": "torch_geometric"}


def suites() -> list[str]:
    """The names of all suites there are, attention first."""
    names = sorted(path.stem for path in (ROOT / "benchmarks" / "suites").glob("[a-z]*.py"))
    return sorted(names, key=lambda name: name != "attention")


# --- one contender's process ------------------------------------------------------------------------------


def serve(suite_name: str, contender: str) -> None:
    """Answer ``["prepare", workload]`` and ``["time", seconds]``, a line of JSON each, until input ends."""
    from npattn.testing.bench import best_time

    suite = importlib.import_module(f"suites.{suite_name}")
    function = None
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    for line in sys.stdin:
        action, argument = json.loads(line)
        reply: Any = None
        try:
            if action == "prepare":
                function = None
                function = suite.CONTENDERS[contender](argument)
                if function is None:
                    reply = "none"
                else:
                    reply = "ready" if suite.is_right(argument, function()) else "wrong"
            else:
                reply = best_time(function, argument, 2)
        except ImportError as error:
            reply = f"missing: {error}"
        except Exception as error:  # a peer that cannot do a workload must not end the run
            reply = f"failed: {type(error).__name__}: {error}"
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class Worker:
    """A contender in its process."""

    def __init__(self, suite: str, contender: str) -> None:
        self.name = contender
        command = [sys.executable, __file__, "--serve", suite, contender]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, action: str, argument: Any) -> Any:
        """One request, one reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([action, argument]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else "failed: the process ended"

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


# --- the tables ---------------------------------------------------------------------------------------------


def run_suite(name: str, only: str, quick: bool, rounds: int, peak: float, bandwidth: float) -> list[str]:
    """Lines of a Markdown table."""
    suite = importlib.import_module(f"suites.{name}")
    workloads = [w for w in (suite.QUICK if quick else suite.WORKLOADS) if only in w]
    if not workloads:
        return []
    workers = [Worker(name, contender) for contender in suite.CONTENDERS]
    ours, *peers = [worker.name for worker in workers]
    head = ["workload", f"{ours} ms", *(f"{peer} ms" for peer in peers), *(f"x {peer}" for peer in peers)]
    head += ["GFLOP/s", "of limit"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    try:
        for workload in workloads:
            states = {worker.name: worker.ask("prepare", workload) for worker in workers}
            best = {worker.name: float("inf") for worker in workers if states[worker.name] == "ready"}
            for _ in range(rounds):
                for worker in workers:
                    if worker.name in best:
                        elapsed = worker.ask("time", 0.25)
                        if isinstance(elapsed, float):
                            best[worker.name] = min(best[worker.name], elapsed)
                        else:
                            states[worker.name] = elapsed
                            del best[worker.name]
            for contender, state in states.items():
                if state not in ("ready", "none"):
                    print(f"{workload}: {contender}: {state}", file=sys.stderr)
            lines.append(_row(workload, ours, peers, best, states, suite.limit(workload, peak, bandwidth)))
            print(lines[-1], flush=True)
    finally:
        for worker in workers:
            worker.close()
    return lines


def _row(
    workload: str,
    ours: str,
    peers: list[str],
    best: dict[str, float],
    states: dict[str, str],
    limit: tuple[float, float],
) -> str:
    def milliseconds(name: str) -> str:
        if name in best:
            return f"{best[name] * 1e3:.3f}" if best[name] < 0.1 else f"{best[name] * 1e3:.1f}"
        return "wrong" if states[name] == "wrong" else "–"

    own = best.get(ours)
    ratios = [f"{best[peer] / own:.2f}" if own and peer in best else "–" for peer in peers]
    speed = [f"{limit[0] / own:.0f}" if limit[0] else "–", f"{limit[1] / own:.0%}"] if own else ["–", "–"]
    cells = [workload.replace("|", "·"), milliseconds(ours), *map(milliseconds, peers), *ratios, *speed]
    return "| " + " | ".join(cells) + " |"


# --- cold start ---------------------------------------------------------------------------------------------

_FIRST_CALL = """
import time
start = time.perf_counter()
import numpy as np
arrays = [np.ones((1, 2, 70, 32), {dtype!r}) for _ in range(4)]
middle = time.perf_counter()
import npattn
imported = time.perf_counter()
if {backward}:
    out, pullback = npattn.attention_vjp(*arrays[:3], backend="numba")
    first = time.perf_counter()
    pullback(arrays[3])
else:
    first = imported
    npattn.attention(*arrays[:3], backend="numba")
end = time.perf_counter()
print(middle - start, imported - middle, end - first)
"""


def cold_start() -> list[str]:
    """What a fresh process pays: imports, and the first call without and with compiled code on disk."""
    lines = ["| first call | compiling | from the disk cache |", "| --- | --- | --- |"]
    imports = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for dtype in ("float32", "float64"):
            for backward in (False, True):
                environment["NUMBA_CACHE_DIR"] = f"{folder}/{dtype}{backward}"
                times = []
                for _ in range(4):
                    script = _FIRST_CALL.format(dtype=dtype, backward=backward)
                    done = subprocess.run(
                        [sys.executable, "-c", script],
                        env=environment,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    numpy_s, npattn_s, call_s = map(float, done.stdout.split())
                    imports.append((numpy_s, npattn_s))
                    times.append(call_s)
                what = f"{dtype}, {'backward' if backward else 'forward'}"
                lines.append(f"| {what} | {times[0]:.2f} s | {min(times[1:]):.2f} s |")
    numpy_s, npattn_s = (min(column) for column in zip(*imports, strict=True))
    lines += [
        "",
        f"`import numpy` {numpy_s * 1e3:.0f} ms; `import npattn` after it {npattn_s * 1e3:.0f} ms more.",
    ]
    return lines


# --- the report ---------------------------------------------------------------------------------------------


def versions() -> str:
    """The peers that are installed."""
    found = []
    from importlib import metadata

    for label, package in LIBRARIES.items():
        if importlib.util.find_spec(package) is not None:
            found.append(f"{label} {metadata.version(package.replace('_', '-'))}")
    return ", ".join(found) or "no peers installed"


def write_page(lines: list[str]) -> None:
    """Replace what stands between the markers of docs/performance.md, or begin the page."""
    begin, end = "<!-- benchmarks/run.py: begin -->", "<!-- benchmarks/run.py: end -->"
    text = PAGE.read_text() if PAGE.exists() else f"# Performance\n\n{begin}\n{end}\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + after)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few workloads of each suite")
    parser.add_argument("--suite", choices=suites(), help="one suite only")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=5, help="turns each contender takes")
    parser.add_argument("--no-cold-start", action="store_true", help="leave out imports and compile times")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    from npattn.kernels.tile.numba_cpu._peak import fma_peak
    from npattn.testing.bench import copy_bandwidth, machine

    peak, bandwidth = fma_peak(seconds=2.0), copy_bandwidth(2.0)
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {machine()}, {platform.system()}; {versions()}.",
        "",
        f"Limits in the same run: {peak / 1e9:.0f} GFLOP/s of float32 multiply-adds on all threads, "
        f"{bandwidth / 1e9:.1f} GB/s copied. Times are the best of {options.rounds} turns; x is how many "
        "times as long the peer takes.",
    ]
    print("\n".join(lines), flush=True)
    for name in [options.suite] if options.suite else suites():
        print(f"\n### {name}\n", flush=True)
        table = run_suite(name, options.only, options.quick, options.rounds, peak, bandwidth)
        if table:
            lines += ["", f"### {name}", "", *table]
    if not options.no_cold_start:
        table = cold_start()
        print("\n### Cold start\n\n" + "\n".join(table))
        lines += ["", "### Cold start", "", *table]
    if options.write:
        write_page(lines)


if __name__ == "__main__":
    main()
