"""Tables and sentences of `slipstream simulate`."""

from __future__ import annotations

from typing import Any

from slipstream.bench.tables import Column, Section, Table, percent, size, times, words


def section(found: dict[str, Any]) -> Section:
    """The report of a result: draft lengths, or a plan for hardware."""
    return lengths(found) if "lengths" in found else plan(found)


def lengths(found: dict[str, Any]) -> Section:
    columns = [Column("K"), Column("tokens per step", digits=2), Column("step cost", digits=2), Column("speed-up", "x"),
               Column("break-even"), words("")]  # fmt: skip
    rows = [
        [row["draft_tokens"], row["tau"], row["step_cost"], row["speedup"], break_even_text(row["break_even"]),
         "best" if row["draft_tokens"] == found["best"] else ""]
        for row in found["lengths"]
    ]  # fmt: skip
    note = (
        "K: draft length. step cost: in decode steps of the target. break-even: the acceptance rate above which this "
        "length is faster than plain decoding."
    )
    shown = next((row for row in found["lengths"] if row["draft_tokens"] == found["best"]), None)
    lead = f"Best: K={found['best']}" + (f", {times(shown['speedup'])} plain decoding." if shown else ".")
    made = Section("Speed-up", lead if found["best"] else "No draft length is faster than plain decoding.")
    made.tables.append(Table("Speed-up by draft length", columns, rows, note))
    if found["costs"]["curve"] and len(found["costs"]["curve"]["rows"]) > 2:  # measured
        from slipstream.plan.report_diagnosis import costs

        made.tables.append(costs(found["costs"]["curve"]))
    made.notes = [f"Assumptions: {found['assumptions']}."]
    return made


def break_even_text(break_even: float | None) -> str:
    return "never" if break_even is None else percent(break_even)


def plan(found: dict[str, Any]) -> Section:
    hardware, (target, draft) = found["hardware"], found["models"]
    title = hardware["name"] if hardware["devices"] == 1 else f"{hardware['devices']} x {hardware['name']}"
    columns = [Column("batch"), Column("K"), Column("speed-up", "x"), Column("per user, plain"),
               Column("per user, spec."), Column("total, plain"), Column("total, spec."), Column("memory", "B"),
               words("")]  # fmt: skip
    rows = []
    for load in found["loads"]:
        speeds = [load[f"{kind}tokens_per_second{of}"] for of in ("_per_user", "") for kind in ("plain_", "")]
        fits = "" if load["fits"] else "too large"
        rows.append([load["batch"], load["draft_tokens"] or "off", load["speedup"], *speeds, load["memory"], fits])
    note = "Columns 4 to 7: tokens/s."
    if not all(load["fits"] for load in found["loads"]):
        note += f" too large: more than 90% of the memory ({size(hardware['memory'] * hardware['devices'])})."
    made = Section("Plan", users(found, title))
    made.tables.append(Table(f"{target['name']} + {draft['name']} on {title}", columns, rows, note))
    made.notes = [f"{line}." for line in assumptions(found)]
    return made


def users(found: dict[str, Any], title: str) -> str:
    each, bound = found["users_a_group"], found["latency_ms"]
    limit = "that fit into memory" if bound is None else f"with at most {bound:g} ms per token"
    text = f"Concurrent users {limit}: {each['plain']} plain, {each['speculative']} with speculation, on {title}."
    if found["users"]:
        devices = found["hardware"]["devices"]
        needed = [
            f"{kind} "
            + ("impossible with any number of devices" if n is None else f"{n * devices} devices ({n} groups)")
            for kind, n in found["groups"].items()
        ]
        text += f" For {found['users']} users: {', '.join(needed)}."
    return text


def assumptions(found: dict[str, Any]) -> list[str]:
    hardware, (target, draft), load = found["hardware"], found["models"], found["loads"][0]
    lines = [
        f"Assumptions at batch {load['batch']}: {load['assumptions']}",
        f"{target['name']}: {size(target['weight_bytes'])} of weights at {target['bits']:g} bits, "
        f"{size(target['kv_bytes'])} of KV cache per token; {draft['name']}: {size(draft['weight_bytes'])}, "
        f"{size(draft['kv_bytes'])}; the draft runs on {load['draft_devices']} of {hardware['devices']} devices (one "
        "or all, whichever is faster)",
        f"A forward pass reads at {hardware['reading']:.0%} of the peak bandwidth, computes at "
        f"{hardware['computing']:.0%} of the peak, and has {1e3 * hardware['overhead']:g} ms of overhead",
    ]
    if hardware["devices"] > 1:
        lines.append(
            f"Two exchanges per layer between devices, {1e6 * hardware['exchange']:g} us each and "
            f"{hardware['talking']:.0%} of {hardware['link'] / 1e9:.0f} GB/s"
        )
    if target["experts"]:
        lines.append(
            f"{target['picked']} of {target['experts']} experts per row, chosen uniformly and independently: more rows "
            "read more experts"
        )
    if min(target["bits"], draft["bits"]) < 16:
        lines.append("This is optimistic: kernels for quantised weights reach less of the bandwidth in practice")
    return [*lines, "Prefill and queueing are not included"]
