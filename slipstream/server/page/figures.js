// Figures of requests: rates beside each other, acceptance by position, one line for each answer.

const at = (id) => document.getElementById(id);
const percent = (share) => `${Math.round(share * 100)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};

const rateOf = (runs) => {
  const known = runs.map((run) => run.rate).filter((rate) => rate !== null);
  return known.length ? median(known) : null;
};

/** The number of runs, and their rates from the lowest to the highest. */
const spread = (runs) => {
  const rates = runs.map((run) => run.rate).filter((rate) => rate !== null);
  return `${runs.length} of ${whole(Math.min(...rates))} to ${whole(Math.max(...rates))}`;
};

/** One line on a run, also while it runs. */
export function line(run) {
  const drafted = run.tokens.filter((token) => token.drafter !== null).length;
  const said = [`${run.tokens.length} tokens`];
  if (!run.plain) said.push(`${drafted} of them drafted`);
  if (run.rate !== null) said.push(`${whole(run.rate)} tokens/s`);
  if (run.firstMilliseconds !== null) said.push(`first after ${whole(run.firstMilliseconds)} ms`);
  const stats = run.statistics;
  if (stats) {
    if (stats.acceptance_rate !== null) said.push(`acceptance rate ${percent(stats.acceptance_rate)}`);
    said.push(`${stats.mean_acceptance_length.toFixed(2)} tokens a step`);
  }
  if (run.finish === "length") said.push("ended at the most tokens");
  if (run.ended && run.finish === null) said.push("incomplete");
  return said.join(" · ");
}

/** The two rates. fast, plain: runs of the same request with and without speculation, which may still run. earlier: the
 * plain rate of an earlier request, shown until there is one of this request. */
export function showRates(fast, plain, earlier = null) {
  const rates = [rateOf(fast), rateOf(plain)];
  const borrowed = !plain.length && earlier !== null;
  if (borrowed) rates[1] = earlier;
  const most = Math.max(...rates, 1);
  [...at("rates").rows].forEach((row, i) => {
    row.querySelector(".value").textContent = rates[i] === null ? "–" : whole(rates[i]);
    row.querySelector("rect").setAttribute("width", `${(100 * (rates[i] ?? 0)) / most}%`);
  });
  const ended = [...fast, ...plain].every((run) => run.finish !== null);
  const known = ended && !borrowed && rates.every((rate) => rate !== null);
  at("ratio").textContent = known ? `Speculation decodes at ${(rates[0] / rates[1]).toFixed(2)} times the plain rate.` : "";
  const about = note(fast, plain, rates);
  if (borrowed) about.unshift("The plain rate is that of an earlier request.");
  at("rates-note").textContent = about.join(" ");
}

function note(fast, plain, rates) {
  const runs = [...fast, ...plain];
  const said = [];
  if (!runs.length) return ["After the first token of an answer; as the engine measures it, when the answer has ended."];
  const ended = runs.every((run) => run.finish !== null);
  if (ended && rates.some((rate, i) => rate === null && [fast, plain][i].length)) {
    said.push("The answer is too short to measure a rate.");
  }
  if (ended && fast.length && plain.length) {
    said.push(runs.length === 2 ? "One run of each, one after the other." :
      `Medians of runs in turns: ${spread(fast)} tokens/s with speculation, ${spread(plain)} without.`);
    if (fast[0].body.temperature > 0) said.push("The text is sampled, so the texts may differ.");
    else said.push(fast[0].text === plain[0].text ? "The texts are the same." : "The texts differ.");
  }
  if (runs.some((run) => run.statistics?.others > 0)) {
    said.push("Other requests ran at the same time: these rates do not compare speculation with plain decoding.");
  } else if (ended) {
    said.push("No other request ran at the server meanwhile; other programs on its machine are not known.");
  }
  return said;
}

/** Acceptance by position of a run that has ended. */
export function showPositions(run) {
  const rates = run?.statistics?.position_rates ?? [];
  at("positions").hidden = !rates.length;
  at("positions").tBodies[0].replaceChildren(...rates.map((rate, i) => row(`${i + 1}`, rate)));
}

function row(name, rate) {
  const line = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = name;
  const value = document.createElement("td");
  value.className = "value";
  value.textContent = percent(rate);
  const graph = document.createElement("td");
  graph.className = "graph";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  bar.setAttribute("height", "100%");
  bar.setAttribute("width", `${100 * rate}%`);
  bar.setAttribute("class", "fast");
  svg.append(bar);
  graph.append(svg);
  line.append(head, value, graph);
  return line;
}
