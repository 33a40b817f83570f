// Text with the drafter of each token: by a background, an underline of its own kind, and a name to point at.

const KINDS = 4; // that style.css tells apart

/** The drafters seen so far, each with its kind. The target's own tokens are not marked. */
export class Legend {
  constructor(list) {
    this.list = list;
    this.kinds = new Map();
    this.#add("plain", "the model's own");
  }

  /** The class of a drafter's tokens. */
  of(name) {
    if (name === null) return "";
    if (!this.kinds.has(name)) {
      this.kinds.set(name, `by${(this.kinds.size % KINDS) + 1}`);
      this.#add(this.kinds.get(name), `drafted by ${name}`);
      this.list.hidden = false;
    }
    return this.kinds.get(name);
  }

  #add(kind, text) {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = kind;
    swatch.textContent = text;
    item.append(swatch);
    this.list.append(item);
  }
}

/** Shows tokens in a node: collects them, and appends them when it is flushed, which takes long. */
export class TokenText {
  constructor(node, legend) {
    this.node = node;
    this.legend = legend;
    this.waiting = document.createDocumentFragment();
  }

  add(tokens) {
    for (const token of tokens) if (token.text) this.waiting.append(this.#shown(token));
  }

  flush() {
    this.node.append(this.waiting); // which is empty then
  }

  #shown(token) {
    if (token.drafter === null) return token.text; // appended as text, never as HTML
    const span = document.createElement("span");
    span.className = `t ${this.legend.of(token.drafter)}`;
    span.title = `drafted by ${token.drafter}`;
    span.textContent = token.text;
    return span;
  }
}
