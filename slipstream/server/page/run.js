// One request: what it gave, and how fast.

import { events } from "./api.js";

const FEWEST = 8;

/** A request that runs or has ended. Times are in milliseconds, taken when a piece arrives here. */
export class Run {
  constructor(path, body) {
    this.path = path;
    this.body = body;
    this.tokens = []; // {text, drafter}; drafter is null for a token of the target's own
    this.content = "";
    this.statistics = null; // of the server, when it has ended
    this.finish = null;
    this.ended = false;
    this.asked = this.first = this.last = null;
    this.atFirst = 0; // tokens of the first piece
  }

  get plain() {
    return this.body.speculation?.enabled === false;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Tokens after the first step over the time from its end; null if there are too few to tell. While it runs, from when
   * pieces arrive here; then as the engine measured it, because a busy browser takes several pieces at once. */
  get rate() {
    const count = this.statistics?.decode_tokens ?? this.tokens.length - this.atFirst;
    const seconds = this.statistics?.decode_seconds ?? (this.last - this.first) / 1000;
    return count < FEWEST || seconds <= 0 ? null : count / seconds;
  }

  get firstMilliseconds() {
    return this.first === null ? null : this.first - this.asked;
  }

  /** Runs it. added: called with the tokens of each piece. Raises Refused, Cut, and an AbortError. */
  async follow(signal, added) {
    this.asked = performance.now();
    try {
      for await (const event of events(this.path, this.body, signal)) {
        if (event.choices[0]) this.#take(event.choices[0], added);
      }
    } finally {
      this.ended = true;
    }
  }

  #take(choice, added) {
    this.content += choice.delta?.content ?? choice.text ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    this.statistics = choice.statistics ?? this.statistics;
    if (!choice.tokens?.length) return;
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.atFirst = choice.tokens.length;
    }
    for (const token of choice.tokens) this.tokens.push(token); // of any number: more than a call takes arguments
    added(choice.tokens);
  }

  /** The same request without speculation. */
  plainly() {
    return new Run(this.path, { ...this.body, speculation: { enabled: false } });
  }

  /** The same request once more. */
  again() {
    return new Run(this.path, this.body);
  }
}
