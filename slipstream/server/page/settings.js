// The form of settings, and the request that it stands for.

const at = (id) => document.getElementById(id);

const FORMS = {
  json: "Schema",
  regex: "Expression",
  choice: "Answers",
  grammar: "Grammar",
};

/** Offers the drafter of the model, and none. model: as /v1/models describes it. */
export function offer(model) {
  const drafter = model.drafter === "none" ? "" : model.drafter;
  const options = [...(drafter ? [[drafter, drafter]] : []), ["", "off: plain decoding"]];
  at("drafter").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  at("drafter").value = drafter;
  at("drafter").onchange = () => fitLength(model, true);
  at("length").oninput = () => fitLength(model, false);
  at("form").onchange = fitForm;
  fitLength(model, true);
  fitForm();
}

function fitLength(model, reset) {
  const most = at("drafter").value ? model.draft_tokens : undefined;
  at("length").disabled = most === undefined;
  if (most !== undefined && reset) {
    at("length").max = most;
    at("length").value = most;
  }
  at("length-shown").value = most === undefined ? "none" : at("length").value;
}

function fitForm() {
  const kind = at("form").value;
  at("form-area").hidden = !(kind in FORMS);
  at("form-label").textContent = FORMS[kind] ?? "";
}

/** Sets what an example needs, and the rest as it was in the beginning. */
export function apply({ form = "", formText = "", prediction = "", temperature = 0 }) {
  at("form").value = form;
  at("form-text").value = formText;
  at("prediction").value = prediction;
  at("temperature").value = temperature;
  fitForm();
}

/** The fields of a request, without its text. Throws an Error with what is wrong. */
export function fields() {
  const request = {
    stream: true,
    statistics: true,
    temperature: at("temperature").valueAsNumber,
    speculation: at("drafter").value ? { draft_tokens: at("length").valueAsNumber } : { enabled: false },
  };
  if (Number.isNaN(request.temperature)) throw new Error("The temperature is not a number.");
  if (at("tokens").value) request.max_tokens = at("tokens").valueAsNumber;
  if (at("form").value) request.structured_outputs = structured(at("form").value, at("form-text").value);
  if (at("prediction").value) request.prediction = { type: "content", content: at("prediction").value };
  return request;
}

function structured(kind, text) {
  if (kind === "json_object") return { json_object: true };
  if (kind === "choice") return { choice: text.split("\n").filter((line) => line) };
  if (kind !== "json") return { [kind]: text };
  try {
    return { json: JSON.parse(text) };
  } catch (fault) {
    throw new Error(`The schema is not JSON: ${fault.message}`);
  }
}

export const compareAlways = () => at("both").checked;
