// The page: asks, shows answers as they stream, measures them against plain decoding.

import { Cut, Refused, key, model } from "./api.js";
import { line, showPositions, showRates } from "./figures.js";
import { Run } from "./run.js";
import { SAMPLES } from "./samples.js";
import * as settings from "./settings.js";
import { Legend, TokenText } from "./tokens.js";

const at = (id) => document.getElementById(id);
const legend = new Legend(at("legend"));

let messages = []; // of the conversation so far
let fast = []; // runs of the last request with speculation
let plain = []; // and without
let earlier = null; // plain rate of the last request that was decoded plainly
let running = null; // AbortController of what runs

const mode = () => document.querySelector("input[name=mode]:checked").value;

// --- connecting ---------------------------------------------------------------------------------------------------

async function connect() {
  try {
    const described = await model();
    at("model").textContent = [described.id, described.drafter === "none" ? "no drafter" : `drafter ${described.drafter}`,
      `rule ${described.rule}`, [described.backend, described.weights].filter(Boolean).join(" "),
      `context of ${described.max_model_len} tokens`].filter(Boolean).join(" · ");
    settings.offer(described);
    at("unlock").hidden = true;
    at("forget").hidden = !key.get();
    at("send").disabled = false;
    explain(null);
    at("prompt").focus();
  } catch (fault) {
    at("send").disabled = true;
    if (fault instanceof Refused && fault.status === 401) askKey();
    else {
      at("model").textContent = "Not connected. Reload the page to try again.";
      explain(fault);
    }
  }
}

function askKey() {
  at("model").textContent = "Locked.";
  at("unlock-why").textContent = key.get()
    ? "The server does not know this key." : "This server answers only requests with a key.";
  key.forget();
  at("forget").hidden = true;
  at("send").disabled = true;
  at("unlock").hidden = false;
  at("key").value = "";
  at("key").focus();
}

at("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(at("key").value.trim());
  connect();
});
at("forget").addEventListener("click", askKey);

// --- asking -------------------------------------------------------------------------------------------------------

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (running || !text || at("send").disabled) return;
  let body;
  try {
    body = settings.fields();
  } catch (fault) {
    explain(fault);
    return;
  }
  const chat = mode() === "chat";
  if (chat) body.messages = [...messages, { role: "user", content: text }];
  else body.prompt = text;
  const run = new Run(chat ? "v1/chat/completions" : "v1/completions", body);
  const before = [fast, plain];
  fast = run.plain ? [] : [run];
  plain = run.plain ? [run] : [];
  working(async (signal) => {
    const article = show(chat, text);
    showPositions(null);
    try {
      await follow(run, article, signal);
    } finally {
      if (!run.tokens.length) {
        article.remove();
        [fast, plain] = before;
        showRates(fast, plain, earlier);
        showPositions(fast[0]);
      } else if (chat && article.isConnected) {
        messages = [...body.messages, { role: "assistant", content: run.content }];
      }
    }
    if (chat) at("prompt").value = "";
    if (settings.compareAlways() && !run.plain) await decodePlainly(signal);
  });
});

at("compare").addEventListener("click", () => working(decodePlainly));

/** Decodes the last request without speculation; and if that was done already, once more in each way. */
async function decodePlainly(signal) {
  const of = fast[0];
  const article = at("log").lastElementChild;
  if (plain.length) {
    const more = of.again();
    fast.push(more);
    await measure(more, article, signal);
  }
  const beside = of.plainly();
  plain.push(beside);
  await measure(beside, article, signal);
}

/** Runs the last request once more, below its answer: shown in the same way, because showing takes time, too. */
async function measure(run, article, signal) {
  const part = document.createElement("details");
  const title = document.createElement("summary");
  title.textContent = run.plain ? "Decoded plainly" : "Decoded again";
  part.open = true;
  part.append(title, ...room());
  article.append(part);
  try {
    await follow(run, part, signal);
    if (run.rate !== null) title.textContent += `, ${Math.round(run.rate)} tokens/s`;
    part.open = run.body.temperature === 0 && run.text !== fast[0].text;
    part.scrollIntoView({ block: "nearest" });
  } catch (fault) {
    part.remove();
    fast = fast.filter((each) => each !== run);
    plain = plain.filter((each) => each !== run);
    showRates(fast, plain, earlier);
    throw fault;
  }
}

/** Runs it, and shows its text and figures in an article of the conversation, or in a part of one. */
async function follow(run, article, signal) {
  const text = new TokenText(article.querySelector(".answer"), legend);
  const facts = article.querySelector(".facts");
  showRates(fast, plain, earlier);
  let drawing = false;
  const draw = () => {
    drawing = false;
    const followed = facts.getBoundingClientRect().top < innerHeight + 200; // else the reader has scrolled away
    text.flush();
    facts.textContent = line(run);
    showRates(fast, plain, earlier);
    if (followed) facts.scrollIntoView({ block: "nearest" });
  };
  try {
    await run.follow(signal, (tokens) => {
      text.add(tokens);
      if (!drawing) drawing = !!requestAnimationFrame(draw);
    });
  } finally {
    draw();
    if (!run.plain) showPositions(run);
    if (run.plain && run.finish !== null) earlier = run.rate ?? earlier;
  }
}

/** Does one thing at a time, with the buttons set for it, and says how it ended. */
async function working(act) {
  running = new AbortController();
  explain(null);
  at("status").textContent = "Answering.";
  set(true);
  try {
    await act(running.signal);
    at("status").textContent = `The answer is complete: ${line(fast[0] ?? plain[0])}.`;
  } catch (fault) {
    at("status").textContent = "";
    if (fault.name === "AbortError") at("status").textContent = "Stopped.";
    else if (fault instanceof Refused && fault.status === 401) askKey();
    else explain(fault);
  } finally {
    running = null;
    set(false);
  }
}

function set(busy) {
  at("log").setAttribute("aria-busy", busy);
  at("send").disabled = busy;
  at("stop").disabled = !busy;
  const ready = fast.length && fast[0].finish !== null;
  at("compare").disabled = busy || !ready;
  at("compare").textContent = plain.length && ready ? "Measure both again" : "Decode the last request plainly, too";
}

at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});

// --- showing ------------------------------------------------------------------------------------------------------

/** What went wrong, in words; null: nothing. */
function explain(fault) {
  let text = fault?.message ?? "";
  if (fault instanceof Refused && fault.status === 429) {
    text = `The server is busy. Try again in ${fault.retryAfter ?? "a few"} seconds. (${text})`;
  } else if (fault instanceof Refused && fault.status === 0) {
    text = `The answer ended with an error: ${text}`;
  } else if (fault && !(fault instanceof Cut) && !(fault instanceof Refused) && fault.name !== "Error") {
    text = `Error of the page: ${fault.message}`;
    console.error(fault);
  }
  at("error").textContent = text;
}

/** A new article: what was asked, and room for the answer. */
function show(chat, prompt) {
  at("empty").hidden = true;
  if (!chat) clear();
  const article = document.createElement("article");
  const asked = document.createElement(chat ? "p" : "span");
  asked.className = "asked";
  asked.textContent = prompt;
  const [answer, facts] = room();
  if (chat) article.append(asked);
  else answer.append(asked);
  article.append(answer, facts);
  at("log").append(article);
  facts.scrollIntoView({ block: "nearest" });
  return article;
}

/** Room for a text and a line of figures. */
function room() {
  return [["pre", "answer"], ["p", "facts"]].map(([tag, name]) => {
    const element = document.createElement(tag);
    element.className = name;
    return element;
  });
}

function clear() {
  messages = [];
  for (const article of at("log").querySelectorAll("article")) article.remove();
}

function changeMode() {
  const chat = mode() === "chat";
  at("prompt-label").textContent = chat ? "Message" : "Text to continue";
  at("send").textContent = chat ? "Send" : "Continue";
  at("clear").textContent = chat ? "New conversation" : "Clear";
}

for (const each of document.querySelectorAll("input[name=mode]")) {
  each.addEventListener("change", () => {
    changeMode();
    startAnew();
  });
}
at("clear").addEventListener("click", () => {
  startAnew();
  at("prompt").focus();
});

function startAnew() {
  running?.abort();
  clear();
  fast = [];
  plain = [];
  at("empty").hidden = false;
  explain(null);
  showRates(fast, plain, earlier);
  showPositions(null);
  if (!running) set(false);
}

at("examples").append(...SAMPLES.map((sample) => {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: sample.title });
  button.addEventListener("click", () => {
    document.querySelector(`input[name=mode][value=${sample.mode ?? "chat"}]`).checked = true;
    changeMode();
    settings.apply(sample);
    at("prompt").value = sample.prompt;
    at("prompt").focus();
  });
  const item = document.createElement("li");
  item.append(button);
  return item;
}));

changeMode();
showRates(fast, plain, earlier);
connect();
