"""What `slipstream simulate` found, for people. Every table fits 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.cli import render

if TYPE_CHECKING:
    from slipstream.core.cost_curve import CostCurve


def curve(costs: CostCurve | None) -> dict[str, Any] | None:
    return None if costs is None else {"rows": costs.rows, "seconds": costs.seconds}


def show(found: dict[str, Any]) -> None:
    """The tables of whatever was found."""
    for key, table in (
        ("rules_of_thumb", _rules), ("presets", _presets), ("lengths", _lengths), ("loads", _plan),
    ):  # fmt: skip
        if key in found:
            table(found)


def _rules(found: dict[str, Any]) -> None:
    rules = found["rules_of_thumb"]
    costs = list(rules[0]["closed_form"])
    made = render.table("acceptance: speed-up", "holds for", *(f"c = {c}" for c in costs), left=2)
    for rule in rules:
        worked = [f"{rule['closed_form'][c]['speedup']:.2f}x {rule['closed_form'][c]['gamma']:>2}" for c in costs]
        made.add_row(rule["text"], rule["holds"], *worked)
    console = render.out()
    console.print(made)
    console.print(
        "c: cost of a draft step in target steps. Right: what the closed form gives there, and gamma, the draft "
        "length: the rule's own, or the best. It takes guesses to stand independently and checking to be free, so it "
        "is the best case: real acceptance falls with depth."
    )


def _presets(found: dict[str, Any]) -> None:
    made = render.table("--hardware", "memory", "GB/s", "TFLOP/s", "GB/s link", "rows to the ridge")
    for key, one in found["presets"].items():
        sizes = one["memory"] / 1e9, one["bandwidth"] / 1e9, one["flops"] / 1e12, one["link"] / 1e9, one["ridge"]
        made.add_row(key, *(f"{size:.0f}" for size in sizes))
    console = render.out()
    console.print(made)
    for one in found["presets"].values():
        console.print(f"- {one['source']}.")
    one = next(iter(found["presets"].values()))
    console.print(
        f"Assumed of all: a forward reads at {one['reading']:.0%} and computes at {one['computing']:.0%} of the peak, "
        f"and takes {1e3 * one['overhead']:g} ms beside that; an exchange between devices takes "
        f"{1e6 * one['exchange']:g} us and {one['talking']:.0%} of the link. Ridge: rows from which a dense 16-bit "
        "model computes longer than it reads."
    )


def _lengths(found: dict[str, Any]) -> None:
    console = render.out()
    console.print(_acceptance(found))
    made = render.table(
        "draft\nlength",
        "tokens\na round",
        "round\ncosts",
        "speed-up",
        "drawn,\n± error",
        "one text,\n10-90%",
        "pays\nabove",
    )
    for row in found["lengths"]:
        drawn = row["drawn"]
        even = "never" if row["break_even"] is None else render.percent(row["break_even"])
        made.add_row(
            str(row["gamma"]) + (" *" if row["gamma"] == found["best"] else "  "),
            f"{row['tau']:.2f}",
            f"{row['cost']:.2f}",
            f"{row['speedup']:.2f}x",
            _sampled(drawn["speedup"]),
            _range(drawn["spread"]),
            even,
        )
    console.print(made)
    shown = next((row for row in found["lengths"] if row["gamma"] == found["best"]), None)
    if not found["best"]:
        console.print("No draft length pays: decode plainly.", style="bold")
    elif shown:
        console.print(f"Best: draft length {found['best']}, {shown['speedup']:.2f}x plain decoding.", style="bold")
    if found["tree"]:
        console.print(_tree(found["tree"]), style="bold")
    drawn = found["lengths"][0]["drawn"]
    for line in (
        *found["assumptions"],
        f"round costs: in plain steps. Drawn: {drawn['texts']} texts of {drawn['tokens']} tokens, with the short "
        "rounds at their end, ± one standard error; one text: 10th to 90th percentile",
        "pays above: the acceptance rate from which this length is faster than plain decoding",
    ):
        console.print(f"- {line}.")


def _plan(found: dict[str, Any]) -> None:
    console, hardware = render.out(), found["hardware"]
    title = hardware["name"] if hardware["devices"] == 1 else f"{hardware['devices']} x {hardware['name']}"
    target, draft = found["models"]
    console.print(f"{target['name']} + {draft['name']} on {title}. {_acceptance(found)}")
    made = render.table(
        "batch", "K", "speed-up", "tokens/s a user\nplain > spec.", "tokens/s in all\nplain > spec.", "memory"
    )
    for load in found["loads"]:
        made.add_row(
            str(load["batch"]),
            str(load["draft_tokens"]) if load["draft_tokens"] else "off",
            f"{load['speedup']:.2f}x",
            f"{load['plain_tokens_per_second_per_user']:.0f} > {load['tokens_per_second_per_user']:.0f}",
            f"{load['plain_tokens_per_second']:.0f} > {load['tokens_per_second']:.0f}",
            render.size(load["memory"]) + ("" if load["fits"] else " !"),
        )
    console.print(made)
    if not all(load["fits"] for load in found["loads"]):
        console.print(f"! more than 90% of {render.size(hardware['memory'] * hardware['devices'])}: does not fit.")
    for line in _users(found, title):
        console.print(line, style="bold")
    for load in found["loads"]:
        if load["tree"]:
            console.print(f"Batch {load['batch']}: {_tree(load['tree'])}")
    for line in _assumptions(found):
        console.print(f"- {line}.")


def _users(found: dict[str, Any], title: str) -> list[str]:
    each, bound = found["users_a_group"], found["latency_ms"]
    where = "that fit into memory" if bound is None else f"at a token every {bound:g} ms or sooner"
    lines = [f"Users at once {where}: {each['plain']} plain, {each['speculative']} with speculation, on {title}."]
    if found["users"]:
        devices = found["hardware"]["devices"]
        needed = [
            f"{kind} " + ("impossible at any number" if n is None else f"{n * devices} devices ({n} groups)")
            for kind, n in found["groups"].items()
        ]
        lines.append(f"For {found['users']} users: {', '.join(needed)}.")
    return lines


def _assumptions(found: dict[str, Any]) -> list[str]:
    hardware, (target, draft), load = found["hardware"], found["models"], found["loads"][0]
    lines = [
        f"{target['name']}: {render.size(target['weight_bytes'])} of weights at {target['bits']:g} bits, "
        f"{render.size(target['kv_bytes'])} of KV a token; {draft['name']}: {render.size(draft['weight_bytes'])}, "
        f"{render.size(draft['kv_bytes'])}; {found['context']} tokens of context each",
        f"a draft step costs {load['c']:.3f} target steps at batch {load['batch']} (draft on "
        f"{load['draft_devices']} of {hardware['devices']} devices, whichever is faster: one or all)",
        f"a forward reads at {hardware['reading']:.0%} of the peak bandwidth, computes at {hardware['computing']:.0%} "
        f"of the peak, and takes {1e3 * hardware['overhead']:g} ms beside that",
    ]
    if hardware["devices"] > 1:
        lines.append(
            f"two exchanges a layer between devices, {1e6 * hardware['exchange']:g} us each and "
            f"{hardware['talking']:.0%} of {hardware['link'] / 1e9:.0f} GB/s"
        )
    if target["experts"]:
        lines.append(
            f"{target['picked']} of {target['experts']} experts a row, picked evenly and independently: more rows read "
            "more of them"
        )
    if min(target["bits"], draft["bits"]) < 16:
        lines.append("kernels for quantised weights reach less of the bandwidth in practice: this is optimistic")
    return [*lines, "prefill and queueing are not counted; guesses stand independently of each other"]


def _tree(tree: dict[str, Any]) -> str:
    if not tree["nodes"]:
        return "No tree pays."
    return (
        f"Best tree: {tree['nodes']} guesses, {tree['height']} deep: {tree['tau']:.2f} tokens a round, "
        f"{tree['speedup']:.2f}x (drawn {_sampled(tree['drawn']['speedup'])})."
    )


def _acceptance(found: dict[str, Any]) -> str:
    alpha, rates = found["acceptance"]["alpha"], found["acceptance"]["position_rates"]
    if alpha is None:
        return "Acceptance by position: " + ", ".join(f"{rate:.0%}" for rate in rates) + "."
    return f"Acceptance {alpha:.0%}."


def _sampled(value: dict[str, float]) -> str:
    return f"{value['value']:.3f} ± {value['error']:.3f}"


def _range(spread: tuple[float, float, float]) -> str:
    return f"{spread[0]:.2f}-{spread[2]:.2f}"
