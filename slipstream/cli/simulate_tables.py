"""What `slipstream simulate` found, as tables and sentences."""

from __future__ import annotations

from typing import Any

from slipstream.lab.tables import Column, Section, Table, percent, size, times, words


def section(found: dict[str, Any]) -> Section:
    """Of whatever was asked for."""
    return presets(found) if "presets" in found else lengths(found) if "lengths" in found else plan(found)


def presets(found: dict[str, Any]) -> Section:
    columns = [words("--hardware"), Column("memory, GB"), Column("GB/s"), Column("TFLOP/s"), Column("GB/s link"),
               Column("rows to the ridge")]  # fmt: skip
    rows = [
        [key, one["memory"] / 1e9, one["bandwidth"] / 1e9, one["flops"] / 1e12, one["link"] / 1e9, one["ridge"]]
        for key, one in found["presets"].items()
    ]
    one = next(iter(found["presets"].values()))
    note = (
        f"Assumed of all: a forward reads at {one['reading']:.0%} and computes at {one['computing']:.0%} of the peak, "
        f"and takes {1e3 * one['overhead']:g} ms beside that; an exchange between devices takes "
        f"{1e6 * one['exchange']:g} us and {one['talking']:.0%} of the link. Ridge: rows from which a dense 16-bit "
        "model computes longer than it reads."
    )
    sources = [f"{one['source']}." for one in found["presets"].values()]
    return Section("Hardware", "Sources:", [Table("Hardware presets", columns, rows, note)], notes=sources)


def lengths(found: dict[str, Any]) -> Section:
    columns = [Column("K"), Column("tokens a step", digits=2), Column("step cost", digits=2), Column("speed-up", "x"),
               Column("pays above"), words("")]  # fmt: skip
    rows = [
        [row["draft_tokens"], row["tau"], row["step_cost"], row["speedup"], pays(row["break_even"]),
         "best" if row["draft_tokens"] == found["best"] else ""]
        for row in found["lengths"]
    ]  # fmt: skip
    note = (
        "K: draft length. step cost: in plain steps. pays above: the acceptance rate from which this length is faster "
        "than plain decoding."
    )
    shown = next((row for row in found["lengths"] if row["draft_tokens"] == found["best"]), None)
    lead = f"Best: K={found['best']}" + (f", {times(shown['speedup'])} plain decoding." if shown else ".")
    made = Section("Speed-up", lead if found["best"] else "No draft length pays: decode plainly.")
    made.tables.append(Table("Speed-up by draft length", columns, rows, note))
    if found["costs"]["curve"] and len(found["costs"]["curve"]["rows"]) > 2:  # measured
        from slipstream.lab.report_doctor import costs

        made.tables.append(costs(found["costs"]["curve"]))
    made.notes = [*([best_tree(found["tree"])] if found["tree"] else []), f"Assumptions: {found['assumptions']}."]
    return made


def pays(break_even: float | None) -> str:
    return "never" if break_even is None else percent(break_even)


def plan(found: dict[str, Any]) -> Section:
    hardware, (target, draft) = found["hardware"], found["models"]
    title = hardware["name"] if hardware["devices"] == 1 else f"{hardware['devices']} x {hardware['name']}"
    columns = [Column("batch"), Column("K"), Column("speed-up", "x"), Column("a user, plain"), Column("a user, spec."),
               Column("in all, plain"), Column("in all, spec."), Column("memory", "B"), words("")]  # fmt: skip
    rows = []
    for load in found["loads"]:
        speeds = [load[f"{kind}tokens_per_second{of}"] for of in ("_per_user", "") for kind in ("plain_", "")]
        fits = "" if load["fits"] else "too much"
        rows.append([load["batch"], load["draft_tokens"] or "off", load["speedup"], *speeds, load["memory"], fits])
    note = "Columns 4 to 7: tokens/s."
    if not all(load["fits"] for load in found["loads"]):
        note += f" too much: more than 90% of the memory ({size(hardware['memory'] * hardware['devices'])})."
    made = Section("Plan", users(found, title))
    made.tables.append(Table(f"{target['name']} + {draft['name']} on {title}", columns, rows, note))
    trees = [f"Batch {load['batch']}: {best_tree(load['tree'])}" for load in found["loads"] if load["tree"]]
    made.notes = [*trees, *(f"{line}." for line in assumptions(found))]
    return made


def users(found: dict[str, Any], title: str) -> str:
    each, bound = found["users_a_group"], found["latency_ms"]
    where = "that fit into memory" if bound is None else f"at a token every {bound:g} ms or sooner"
    said = f"Users at once {where}: {each['plain']} plain, {each['speculative']} with speculation, on {title}."
    if found["users"]:
        devices = found["hardware"]["devices"]
        needed = [
            f"{kind} " + ("impossible at any number" if n is None else f"{n * devices} devices ({n} groups)")
            for kind, n in found["groups"].items()
        ]
        said += f" For {found['users']} users: {', '.join(needed)}."
    return said


def assumptions(found: dict[str, Any]) -> list[str]:
    hardware, (target, draft), load = found["hardware"], found["models"], found["loads"][0]
    lines = [
        f"Assumptions at batch {load['batch']}: {load['assumptions']}",
        f"{target['name']}: {size(target['weight_bytes'])} of weights at {target['bits']:g} bits, "
        f"{size(target['kv_bytes'])} of KV a token; {draft['name']}: {size(draft['weight_bytes'])}, "
        f"{size(draft['kv_bytes'])}; the draft runs on {load['draft_devices']} of {hardware['devices']} devices, "
        "whichever is faster: one or all",
        f"A forward reads at {hardware['reading']:.0%} of the peak bandwidth, computes at {hardware['computing']:.0%} "
        f"of the peak, and takes {1e3 * hardware['overhead']:g} ms beside that",
    ]
    if hardware["devices"] > 1:
        lines.append(
            f"Two exchanges a layer between devices, {1e6 * hardware['exchange']:g} us each and "
            f"{hardware['talking']:.0%} of {hardware['link'] / 1e9:.0f} GB/s"
        )
    if target["experts"]:
        lines.append(
            f"{target['picked']} of {target['experts']} experts a row, picked evenly and independently: more rows read "
            "more of them"
        )
    if min(target["bits"], draft["bits"]) < 16:
        lines.append("Kernels for quantised weights reach less of the bandwidth in practice: this is optimistic")
    return [*lines, "Prefill and queueing are not counted"]


def best_tree(tree: dict[str, Any]) -> str:
    if not tree["nodes"]:
        return "No tree pays."
    return (
        f"Best tree: {tree['nodes']} draft tokens, {tree['height']} deep: {tree['tau']:.2f} tokens a step, "
        f"{times(tree['speedup'])}."
    )
