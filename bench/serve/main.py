"""The load generator: `orcinus bench serve`. Open loop (Poisson, gamma, trace) or closed loop, streaming; several loads
one after another are a sweep.

Times count from when a request was due, so a slow server cannot slow its own load down (no coordinated omission).
When this program itself used more than 80 % of a core, its rates are not a server's figures and are not printed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.errors import ConfigurationError

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "`orcinus bench serve` needs aiohttp, which is not installed; run `make install`"
    ) from error

from bench.result import provenance
from bench.serve import client as load_client
from bench.serve import report as load_report
from bench.serve.client import Target
from bench.serve.options import parser
from bench.serve.stats import Record, Run, Slo, summarise
from services.launcher.rundir import RunDir
from services.simulator.workload import traffic
from services.simulator.workload.traffic import Arrival
from shared.messages import quantity
from shared.security import api_keys
from shared.settings import LauncherSettings

CLIENT_CPU_LIMIT = 0.80
DEFAULT_CONCURRENCY = 8
LATE_LIMIT_MS = 10.0
RATES = ("throughput_tok_s", "output_tok_s", "request_rps", "goodput_rps")
REFUSALS = ("http_429", "http_503")


class WrongUse(Exception):  # noqa: N818 - the term of the exit codes
    """The command cannot be carried out as given; its message says what to change. Exit code 2."""


def complete(options: argparse.Namespace, run_dir: Path) -> None:
    """Fill in what was left out: address and model of the stack that runs in `run_dir`, key, and a load."""
    stack = RunDir(run_dir).running()
    if not options.url:
        options.url = stack.url if stack else "http://127.0.0.1:8000"
        options.model = options.model or (stack.model if stack else "")
    options.api_key = options.api_key or os.environ.get("ORCINUS_API_KEY", "")
    file = os.environ.get("ORCINUS_API_KEY_FILE")
    if file and not options.api_key:
        options.api_key = next(iter(Path(file).read_text().split()), "")
    if options.rate is None and options.concurrency is None and options.trace is None:
        options.concurrency = [DEFAULT_CONCURRENCY]


def loads(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the options of each run of a sweep: one value of --rate or --concurrency, and its number of requests."""
    if options.rate is not None and options.concurrency is not None:
        raise WrongUse("--rate (open loop) and --concurrency (closed loop) exclude each other")
    if options.seconds is not None and (options.rate is None or options.requests):
        raise WrongUse("--seconds goes with --rate, and without --requests")
    runs = []
    for rate in options.rate or [None]:
        for concurrency in options.concurrency or [None]:
            run = argparse.Namespace(**{**vars(options), "rate": rate, "concurrency": concurrency})
            if options.seconds is not None:
                run.requests = max(1, math.ceil(rate * options.seconds))
            runs.append(run)
    if len(runs) > 1 and (options.records or options.plot):
        raise WrongUse("--records and --plot are of one run; a sweep has --csv and --html")
    if (options.plot or options.html) and importlib.util.find_spec("matplotlib") is None:
        raise WrongUse("--plot and --html need matplotlib, which is not installed; run `make install-dev`")
    return runs


def schedule(options: argparse.Namespace) -> tuple[list[Arrival], int]:
    """Return the requests of the run and the number of cut ones. Raises WrongUse."""
    open_loop = options.concurrency is None
    if options.concurrency == 0:
        raise WrongUse("--concurrency must be at least 1")
    if not options.text and not options.first_id < options.vocab_size:
        raise WrongUse(f"--first-id {options.first_id} must be below --vocab-size {options.vocab_size}")
    rate = options.rate or 0.0
    if options.trace is not None:
        try:
            trace = traffic.read_trace(options.trace)
            # A closed loop takes the trace's lengths only, so that any rate will do.
            arrivals = traffic.from_trace(
                trace,
                options.requests,
                rate if open_loop else 1.0,
                options.rate_scale,
                options.burstiness,
                options.seed,
            )
        except (OSError, ValueError) as error:
            raise WrongUse(str(error)) from error
    else:
        if open_loop and not rate:
            raise WrongUse("give --rate R (open loop), --concurrency C (closed loop) or --trace FILE")
        total = options.requests or 100
        times = traffic.gamma_times(total, rate or 1.0, options.burstiness, options.seed)
        prompts = traffic.lengths(total, options.prompt_tokens, options.seed, 0)
        outputs = traffic.lengths(total, options.output_tokens, options.seed, 1)
        arrivals = [Arrival(float(t), int(p), int(o)) for t, p, o in zip(times, prompts, outputs, strict=True)]
    return traffic.clip(arrivals, options.clip_tokens) if options.clip_tokens else (arrivals, 0)


async def open_loop(
    session: aiohttp.ClientSession, target: Target, arrivals: Sequence[Arrival], progress: Progress
) -> list[Record]:
    """Send every request when it is due, whatever the server does."""
    records: list[Record] = []
    bar = progress.add_task("open loop", total=len(arrivals))
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, arrival in enumerate(arrivals):
            payload = load_client.body(target, index, arrival.prompt_tokens, arrival.output_tokens)
            record = Record(index, arrival.prompt_tokens, arrival.output_tokens, started + arrival.at_s)
            records.append(record)
            # Also when late: the streams that run must be read between two sends.
            await asyncio.sleep(max(0.0, record.scheduled_s - time.perf_counter()))
            task = group.create_task(load_client.send(session, target, record, payload))
            task.add_done_callback(lambda _: progress.advance(bar))
    return records


async def closed_loop(
    session: aiohttp.ClientSession, target: Target, arrivals: Sequence[Arrival], concurrency: int, progress: Progress
) -> list[Record]:
    """Keep `concurrency` requests in flight; a request is due when another one ends."""
    records: list[Record] = []
    bar = progress.add_task(f"closed loop, {concurrency}", total=len(arrivals))
    waiting = iter(enumerate(arrivals))

    async def user() -> None:
        for index, arrival in waiting:
            payload = load_client.body(target, index, arrival.prompt_tokens, arrival.output_tokens)
            record = Record(index, arrival.prompt_tokens, arrival.output_tokens, time.perf_counter())
            records.append(record)
            await load_client.send(session, target, record, payload)
            progress.advance(bar)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(arrivals))):
            group.create_task(user())
    return records


@asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[tuple[aiohttp.ClientSession, Target]]:
    """Yield a session and a target that answers and serves the model. Raises WrongUse."""
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    url = options.url.rstrip("/").removesuffix("/v1")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        try:
            async with asyncio.timeout(10), session.get(f"{url}/v1/models") as reply:
                if reply.status in (401, 403):
                    reason = api_keys.describe_refusal(_reason(await reply.read()), bool(options.api_key))
                    raise WrongUse(f"{url} answers {reply.status}: {reason}")
                if reply.status != 200:
                    raise WrongUse(f"{url}/v1/models answered {reply.status}: is this an OpenAI-compatible server?")
                names = [str(entry["id"]) for entry in orjson.loads(await reply.read())["data"]]
        except TimeoutError as error:
            raise WrongUse(
                f"{url} did not answer in 10 s; try again when it has less to do, or name another with --url"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise WrongUse(f"no server at {url}; start one with `make run`, or name it with --url") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise WrongUse(f"no server at {url}: {error or type(error).__name__}; name another with --url") from error
        except (KeyError, TypeError) as error:
            raise WrongUse(f"{url}/v1/models did not answer a list of models") from error
        model = options.model or (names[0] if len(names) == 1 else "")
        if model not in names:
            raise WrongUse(f"the server does not serve {model!r}; give --model, one of: {', '.join(names)}")
        yield (
            session,
            Target(
                url,
                model,
                options.text,
                options.first_id,
                options.vocab_size,
                options.temperature,
                options.seed,
                options.timeout,
            ),
        )


def _reason(body: bytes) -> str:
    """Return the reason of a refusal in OpenAI's form."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"


async def measure(
    options: argparse.Namespace, arrivals: list[Arrival], progress: Progress
) -> tuple[dict[str, Any], list[Record]]:
    """Warm up, then run; return the figures and the records. Raises WrongUse."""
    async with connected(options) as (session, target):
        # Another seed, so that the warm-up leaves no prefix of the measured prompts in the server's cache.
        warm = Target(**{**asdict(target), "seed": target.seed + 1_000_003})
        if options.warmup:
            lead = [arrivals[i % len(arrivals)] for i in range(options.warmup)]
            await closed_loop(session, warm, lead, min(4, options.warmup), progress)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if options.concurrency is None:
            records = await open_loop(session, target, arrivals, progress)
        else:
            records = await closed_loop(session, target, arrivals, options.concurrency, progress)
        cpu = (time.process_time() - cpu_s) / max(time.perf_counter() - wall_s, 1e-9)
    figures = {
        "url": target.url,
        "model": target.model,
        "loop": "open" if options.concurrency is None else "closed",
        "rate": options.rate,
        "concurrency": options.concurrency,
        "burstiness": options.burstiness,
        "trace": options.trace.name if options.trace else None,
        "rate_scale": options.rate_scale,
        "warmup": options.warmup,
        "seed": options.seed,
        **summarise(records, Slo(options.ttft_slo_ms / 1000, options.tbt_slo_ms / 1000)),
        "client_cpu": round(cpu, 3),
    }
    return figures, records


def judge(result: dict[str, Any]) -> int:
    """Add `warnings`, remove rates that the client limited, and return the exit code.

    1 when nothing finished, a request failed otherwise than by a refusal (429, 503), or the client was the limit.
    """
    warnings: list[str] = []
    code = 0
    if result["client_cpu"] > CLIENT_CPU_LIMIT:
        warnings.append(
            f"the load generator used {result['client_cpu']:.0%} of a core: it was the limit, "
            "so no rate is given as the server's"
        )
        result.update(dict.fromkeys(RATES))
        code = 1
    late = result["late_ms"]["p99"]
    if late is not None and late > LATE_LIMIT_MS:
        warnings.append(f"1 % of the requests were sent {late:.0f} ms late or later: the machine of the client is busy")
    if result["short"]:
        warnings.append(f"{quantity(result['short'], 'request')} ended with fewer tokens than asked for")
    failed = {kind: number for kind, number in result["errors"].items() if kind not in REFUSALS}
    if failed or not result["finished"]:
        code = 1
    result["warnings"] = warnings
    return code


def write_files(options: argparse.Namespace, result: dict[str, Any], runs: Sequence[Run]) -> None:
    if options.output:
        options.output.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    if options.records:
        with options.records.open("wb") as file:
            file.writelines(orjson.dumps(asdict(record)) + b"\n" for record in runs[0].records)
    if options.csv:
        options.csv.write_text(load_report.csv_rows([run.result for run in runs]))
    if options.plot or options.html:
        from bench.serve import html as load_html
        from bench.serve import plots  # matplotlib takes a second to import and is not needed otherwise

        if options.plot:
            run = runs[0]
            plots.draw(run.records, options.plot, f"{run.result['model']}: {run.result['loop']} loop")
        if options.html:
            options.html.write_text(load_html.report(result, runs))


def run_all(options: argparse.Namespace, stderr: Console) -> list[Run]:
    """Run one load after another. Raises WrongUse."""
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    prepared = [(one, *schedule(one)) for one in loads(options)]
    for one, arrivals, cut in prepared:
        with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
            figures, records = uvloop.run(measure(one, arrivals, progress))
        runs.append(Run({**figures, "clipped": cut}, records))
    return runs


def main(argv: list[str]) -> int:
    """Run the command; return 0 after a measurement, 1 for failures or a client at its limit, 2 for wrong use."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    try:
        complete(options, LauncherSettings().run_dir)
        about = provenance(load_report.command_line(argv))
        runs = run_all(options, Console(stderr=True))
        code = max([judge(run.result) for run in runs])
        single = runs[0].result if len(runs) == 1 else {"runs": [run.result for run in runs]}
        result = {"bench": "serve", **single, **about}
        write_files(options, result, runs)
    except (WrongUse, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in runs:
        load = f"{load_report.load_name(run.result)}: " if len(runs) > 1 else ""
        for warning in run.result["warnings"]:
            print(f"warning: {load}{warning}", file=sys.stderr)
        for kind, detail in first_details(run.records):
            print(f"failed: {load}{kind}: {detail}", file=sys.stderr)
    if options.json:
        print(orjson.dumps(result).decode())
    elif len(runs) == 1:
        load_report.print_table(runs[0].result, Console())
    else:
        load_report.print_sweep([run.result for run in runs], Console())
    return code


def first_details(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return one example of every kind of failure, for the terminal."""
    seen: Counter[str] = Counter()
    examples = []
    for record in records:
        if record.error and not seen[record.error]:
            examples.append((record.error, record.detail))
        seen[record.error] += 1
    return examples
