// Talks to the server. Paths are relative, so that the page also works below the path of a proxy.

const STORED = "slipstream-api-key";

export const key = {
  get: () => sessionStorage.getItem(STORED),
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

/** What the server answered instead of a result. status: of HTTP; 0 if a stream that had begun ended with it. */
export class Refused extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The connection was lost, before an answer or within it. */
export class Cut extends Error {}

async function request(path, options) {
  const headers = { "Content-Type": "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answered;
  try {
    answered = await fetch(path, { ...options, headers });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Cut("The server cannot be reached.");
  }
  if (answered.ok) return answered;
  const said = await answered.json().catch(() => null);
  const message = said?.error?.message ?? `${answered.status} ${answered.statusText}`;
  throw new Refused(answered.status, message, answered.headers.get("Retry-After"));
}

/** What the server says of its model. */
export async function model() {
  const answered = await request("v1/models", {});
  return (await answered.json()).data[0];
}

/** The events of a stream, as objects. Leaving the loop, or aborting the signal, ends the request at the server. */
export async function* events(path, body, signal) {
  const answered = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = answered.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Cut("The stream was cut: the server ended it early.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(0, event.error.message);
        yield event;
      }
    }
  } catch (fault) {
    if (fault instanceof TypeError) throw new Cut("The stream was cut: the connection was lost.");
    throw fault;
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
