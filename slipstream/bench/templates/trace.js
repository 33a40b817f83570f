"use strict";
// Shows what is known of a token: on hover, on focus, by arrow keys (Home, End), by touch.
document.querySelectorAll(".trace").forEach((trace) => {
  const section = trace.closest("section");
  const facts = JSON.parse(section.querySelector(".facts").textContent);
  const tokens = [...trace.querySelectorAll(".t[data-i]")];
  const panel = trace.querySelector(".panel");
  let current = tokens[0];

  const add = (parent, tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return parent.appendChild(made);
  };
  const shown = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "·";

  const tell = (token) => {
    const fact = facts[token.dataset.i];
    panel.replaceChildren();
    add(panel, "p", `“${shown(fact.text)}”`, "said");
    const list = add(panel, "dl");
    const row = (name, value) => { add(list, "dt", name); return add(list, "dd", value); };
    row("origin", `${fact.from}; ${fact.step}`);
    row("probability", `p ${fact.p}` + (fact.q ? `, q ${fact.q}` : "") + `; entropy ${fact.entropy}`);
    const listed = (name, entries, show) => {
      if (!entries.length) return;
      const cell = row(name, "");
      entries.forEach((entry, i) => {
        if (i) cell.append(", ");
        add(cell, "code", shown(entry[0]));
        cell.append(" " + show(entry));
      });
    };
    listed("rejected here", fact.rejected, (e) => `by ${e[1]} (p ${e[2]}` + (e[3] ? `, q ${e[3]})` : ")"));
    listed("target's likeliest", fact.top, (e) => e[1]);
    tokens.forEach((each) => each.classList.toggle("on", each === token));
  };
  const move = (index) => {
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, index))];
    current.tabIndex = -1;
    current = next;
    current.tabIndex = 0;
    current.focus({ preventScroll: false });
  };

  tokens.forEach((token) => {
    token.addEventListener("mouseenter", () => tell(token));
    token.addEventListener("focus", () => tell(token));
    token.addEventListener("click", () => move(tokens.indexOf(token)));
  });
  trace.addEventListener("keydown", (event) => {
    const at = tokens.indexOf(document.activeElement);
    const goal = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: tokens.length - 1 }[event.key];
    if (at < 0 || goal === undefined) return;
    event.preventDefault();
    move(goal);
  });
});
