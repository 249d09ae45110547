"""The generated sections of docs/policies.md, from the committed results and nothing else. Called by policies.py.

A section stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`;
tests/unit/bench/test_policies_table.py fails when page and results differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.studies.policies.claims import OURS
from bench.studies.policies.runs import CLASSES, PREFIX_GROUPS, PREFIX_TOKENS, TBT_MS, TTFT_MS
from bench.studies.policies.static import PRECISION, UNLOADED

TITLES = {"azure_conv_2023": "chat trace", "azure_code_2023": "code trace"}
HEADS = (
    "policy", "goodput, requests/s", "tokens/s", "ms per output token, p50", "TTFT ms, p50", "TTFT ms, p99",
    "TBT ms, p99", "preempted", "tokens recomputed", "GB swapped",
)  # fmt: skip
Row = dict[str, Any]


def replaced(page: str, name: str, section: str) -> str:
    """The page with another section of that name. Raises ValueError where the page has no place for it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    found, count = re.subn(f"{begin}.*?{end}", lambda _: f"{begin}\n{section}\n{end}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} sections {begin} ... {end}; it must have one")
    return found


def measured_section(results: Row) -> str:
    """From bench/results/policies.json."""
    main = [head for head in results["studies"] if head["study"] == "main"]
    scarce, classes, prefixes = (_study(results, name) for name in ("memory", "classes", "prefixes"))
    parts = [
        _intro(results, main[0]),
        *(_goodput(results, head) for head in main),
        _verdict(results, "goodput"),
        _price(results, main),
        *(_details(results, head) for head in main),
        "### Against static batching",
        _static(results),
        "### With few KV blocks",
        f"The chat trace with {scarce['kv_blocks']:,} KV blocks, so that memory binds before anything else does. "
        f"Loads are multiples of what `orca` reaches with so few: {scarce['saturation_rps']:.2f} requests a second.",
        _by_load(results, scarce),
        "### With classes and limits of their own",
        _class_words(classes),
        _violations(results, classes),
        "### With shared system prompts",
        f"The chat trace with one of {PREFIX_GROUPS} system prompts of {PREFIX_TOKENS:,} tokens before each prompt, "
        f"drawn evenly; {prefixes['requests']:,} requests; `orca` reaches {prefixes['saturation_rps']:.2f} a second.",
        _hits(results, prefixes),
    ]
    return "\n\n".join(parts)


def readme_table(results: Row) -> str:
    """Goodput of `orcinus` and of the best other preset at each load of both traces."""
    rows = [
        [*claim["claim"].split(", ")[1:], f"{claim['ours']:.2f}", f"{claim['other']:.2f} (`{claim['who']}`)"]
        for claim in results["claims"]
        if claim["claim"].startswith("goodput")
    ]
    return table(
        ("trace", "load", "`orcinus`", "best other preset"),
        [[TITLES[trace], load.removeprefix("load "), *cells] for trace, load, *cells in rows],
    )


def literature_section(results: Row) -> str:
    """From bench/results/literature.json."""
    machine = results["machine"]
    parts = [
        f"Made by `{results['command']}` at commit {results['commit']} on {results['date'][:10]} "
        f"({machine['cpu']}, {machine['cores']} cores); `orcinus simulate --reproduce` prints the same."
    ]
    for one in results["tables"]:
        parts.append(f"### {one['table']}: {one['title']}")
        parts.append(_state(one))
        parts.append(table(one["columns"], [[_cell(cell) for cell in row] for row in one["rows"]]))
        kept = [claim for claim in one["claims"] if claim["required"] or not claim["holds"]]
        parts.append("\n".join(f"- {'holds' if c['holds'] else '**missed**'}: {c['claim']}" for c in kept))
        parts += [f"{note[0].upper()}{note[1:]}." for note in one["notes"]]
    return "\n\n".join(parts)


def _state(one: dict[str, Any]) -> str:
    """What was wanted of one table and what became of it; what it misses beside that is counted."""
    required = [claim for claim in one["claims"] if claim["required"]]
    missed = sum(not claim["holds"] for claim in one["claims"] if not claim["required"])
    if not required:
        return (
            f"Wanted: nothing, it informs. {missed} of {len(one['claims'])} figures and orders differ from the sheet's."
        )
    state = "reproduced" if one["reproduced"] else "**not reproduced**"
    beside = f", but {missed} ratios are **missed**" if missed else ""
    return f"Wanted: {one['sense']}. Here: {state}{beside}."


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first stand right."""
    names = list(heads)
    lines = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _intro(results: Row, head: Row) -> str:
    machine = results["machine"]
    return (
        f"Simulated: {results['shape']} on {results['device']} by a roofline of its data sheet, {head['kv_blocks']:,} "
        f"KV blocks of 16 tokens, at most {head['max_seqs']} sequences at a time, clients that ask for up to 1,024 "
        f"tokens, 300 us of the scheduler's own time a step. {head['requests']:,} requests a run with the trace's own "
        "lengths and arrival times, these stretched or compressed so that their mean rate is the load times the rate "
        "that `orca` reaches when all arrive at once. Goodput: finished requests a second with TTFT within 2 s and the "
        "P99 of the request's own gaps within 100 ms. Tokens a second count prompts and outputs, from the first "
        f"arrival to the last delivery. Made by `{results['command']}` at commit {results['commit']} on "
        f"{results['date'][:10]} in {results['wall_s'] / 60:.0f} minutes ({machine['cpu']}, {machine['cores']} cores, "
        "shared)."
    )


def _study(results: Row, name: str) -> Row:
    return next(head for head in results["studies"] if head["study"] == name)


def _rows(results: Row, head: Row, load: float) -> list[Row]:
    key = (head["study"], head["trace"], load)
    return [row for row in results["rows"] if (row["study"], row["trace"], row["load"]) == key]


def _name(policy: str) -> str:
    return f"**`{policy}`**" if policy == OURS else f"`{policy}`"


def _goodput(results: Row, head: Row) -> str:
    """Policies by loads; the best of each load in bold."""
    by_load = [{row["policy"]: row["goodput_rps"] for row in _rows(results, head, load)} for load in head["loads"]]
    body = []
    for policy in head["policies"]:
        cells = [(column[policy], column[policy] == max(column.values())) for column in by_load]
        body.append([_name(policy), *(f"**{rps:.2f}**" if best else f"{rps:.2f}" for rps, best in cells)])
    title = (
        f"### Goodput, {TITLES[head['trace']]}\n\nRequests a second; the load is in multiples of "
        f"{head['saturation_rps']:.2f} requests a second. In bold: the most at that load."
    )
    picture = f"![Goodput against load, {TITLES[head['trace']]}](img/goodput-{head['trace']}.png)"
    return f"{title}\n\n{table(('policy', *(f'{load:g}' for load in head['loads'])), body)}\n\n{picture}"


def _verdict(results: Row, kind: str) -> str:
    """Every claim of that kind, missed ones in bold."""
    body = [
        [
            claim["claim"], f"{claim['ours']:,.2f}", f"{claim['other']:,.2f} (`{claim['who']}`)",
            "-" if claim["ratio"] is None else f"{claim['ratio']:.3f}", f"{claim['goal']:g}",
            "holds" if claim["holds"] else "**missed**",
        ]
        for claim in results["claims"]
        if claim["claim"].startswith(kind)
    ]  # fmt: skip
    return table(("claim", "`orcinus`", "best other", "ratio", "at least", ""), body)


def _price(results: Row, heads: Sequence[Row]) -> str:
    """What the goodput costs those who are late anyway, at the highest load of each trace."""
    costs = []
    for head in heads:
        rows = _rows(results, head, head["loads"][-1])
        late = {row["policy"]: row["ttft_ms"]["p99"] / 1e3 for row in rows}
        least = min((name for name in late if name != OURS), key=late.__getitem__)
        costs.append(
            f"{late[OURS]:.1f} s on the {TITLES[head['trace']]} where the least of the others (`{least}`) has "
            f"{late[least]:.1f} s"
        )
    return (
        "Its price under overload: a request that can no longer be in time lets those go first that can, so the last "
        f"wait longer. At a load of {heads[0]['loads'][-1]:g} the P99 TTFT of `orcinus` is {', and '.join(costs)}."
    )


def _figures(row: Row) -> list[str]:
    waits = (row["normalized_latency_ms"]["p50"], row["ttft_ms"]["p50"], row["ttft_ms"]["p99"], row["tbt_ms"]["p99"])
    return [
        _name(row["policy"]), f"{row['goodput_rps']:.2f}", f"{row['throughput_tok_s']:,.0f}",
        *("-" if wait is None else f"{wait:,.1f}" for wait in waits),
        f"{row['preemptions']:,}", f"{row['recomputed_tokens']:,}", f"{row['swapped_bytes'] / 1e9:.1f}",
    ]  # fmt: skip


def _by_load(results: Row, head: Row) -> str:
    return "\n\n".join(
        f"Load {load:g}:\n\n{table(HEADS, map(_figures, _rows(results, head, load)))}" for load in head["loads"]
    )


def _details(results: Row, head: Row) -> str:
    summary = f"All figures, {TITLES[head['trace']]}: {len(head['policies'])} presets at {len(head['loads'])} loads"
    return f"<details>\n<summary>{summary}</summary>\n\n{_by_load(results, head)}\n\n</details>"


def _static(results: Row) -> str:
    static = results["static"]
    alone, bound = static["unloaded_ms"], static["bound_tok_s"]
    ours, *others = (one["saturation"]["throughput_tok_s"] for one in static["policies"])
    best = max(others)
    body = []
    for one in static["policies"]:
        crossing, full = one["crossing"], one["saturation"]
        cells = ["-"] * 3
        if crossing:
            cells = [f"{crossing['offered_rps']:.2f}", f"{crossing['throughput_tok_s']:,.0f}",
                     f"{crossing['normalized_ms']:.2f}"]  # fmt: skip
        body.append([_name(one["policy"]), *cells, f"{full['request_rps']:.2f}", f"{full['throughput_tok_s']:,.0f}"])
    heads = (
        "policy", f"requests/s at {static['limit_ms']:.1f} ms", "tokens/s there", "median ms per token there",
        "requests/s, all at once", "tokens/s, all at once",
    )  # fmt: skip
    return (
        f"{static['requests']:,} requests of the {TITLES[static['trace']]}, {static['saturating']:,} where all arrive "
        f"at once. Unloaded (at {UNLOADED:g} times `orcinus`'s saturation rate) the median normalized latency is "
        f"{alone['orcinus']:.2f} ms a token for `orcinus` and {alone['static']:.2f} for `static`; the limit for all is "
        "twice the former. The load at which a policy meets it is found by bisection, to "
        f"{PRECISION - 1:.0%}; `static` is tried with every batch size listed.\n\n"
        f"{table(heads, body)}\n\n{_verdict(results, 'throughput')}\n\n"
        f"No policy can exceed {bound:,.0f} tokens a second where all arrive at once: so many would one step that "
        "computed every token, read every token's context, and read the weights once. `orcinus` reaches "
        f"{ours / bound:.0%} of that; twice the best `static` would be {2 * best / bound:.0%}. In favour of `static`, "
        "its rows are padded but no context is read of members that have ended.\n\n"
        "![Throughput against median normalized latency](img/static.png)"
    )


def _class_words(head: Row) -> str:
    shares = ", ".join(
        f"`{name}` {share:.0%} (TTFT {TTFT_MS[name]:,.0f} ms, gaps {TBT_MS[name]:,.0f} ms)"
        for name, share in CLASSES.items()
    )
    return (
        f"The chat trace, {head['requests']:,} requests: {shares}. Share of each class's requests that did not "
        "keep their own limits, %."
    )


def _violations(results: Row, head: Row) -> str:
    body = [
        [
            _name(row["policy"]), f"{load:g}", *(f"{100 * row['violations'][name]:.1f}" for name in CLASSES),
            f"{100 * row['slo_violations']:.1f}", f"{row['throughput_tok_s']:,.0f}",
        ]
        for load in head["loads"]
        for row in _rows(results, head, load)
    ]  # fmt: skip
    return table(("policy", "load", *(f"`{name}`" for name in CLASSES), "all", "tokens/s"), body)


def _hits(results: Row, head: Row) -> str:
    body = [
        [
            _name(row["policy"]), f"{load:g}", f"{row['prefix_hit_tokens']:,}", f"{row['goodput_rps']:.2f}",
            f"{row['throughput_tok_s']:,.0f}", f"{row['ttft_ms']['p50']:,.1f}", f"{row['ttft_ms']['p99']:,.1f}",
            f"{row['tbt_ms']['p99']:,.1f}",
        ]
        for load in head["loads"]
        for row in _rows(results, head, load)
    ]  # fmt: skip
    heads = (
        "policy",
        "load",
        "prefix tokens found",
        "goodput",
        "tokens/s",
        "TTFT ms, p50",
        "TTFT ms, p99",
        "TBT ms, p99",
    )
    return table(heads, body)


def _cell(cell: float | int | str | None) -> str:
    return "" if cell is None else f"{cell:,.10g}" if isinstance(cell, float) else str(cell)
