// Examples to begin with. They suit the embedded model, which edits and continues Python.

const CODE = `def read_json(path):
    """Read a JSON file."""
    with open(path) as file:
        return json.load(file)`;

const REPORT = `def write_report(folder, name, rows):
    """Write a report about the rows of a table.

    Args:
        folder: Where the report is written.
        name: Name of the report.
        rows: Rows of the table.
    """
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        for row in rows:
            file.write(f"{row.title}: {row.total}\\n")
    return path`;

const SCHEMA = {
  type: "object",
  properties: {
    function: { type: "string", pattern: "^[a-z_]{3,20}$" },
    arguments: { type: "array", items: { type: "string", pattern: "^[a-z_]{2,12}$" }, maxItems: 3 },
    returns: { enum: ["int", "str", "dict", "None"] },
  },
  required: ["function", "arguments", "returns"],
  additionalProperties: false,
  "x-guidance": { whitespace_flexible: false }, // of llguidance: small models like to fill in spaces
};

export const SAMPLES = [
  { title: "Edit a function", prompt: `Add the comment \`# Settings of the server\` at the top.\n\n${CODE}` },
  { title: "Edit with a prediction", prompt: `Rename the function to \`save_table\`.\n\n${REPORT}`, prediction: REPORT },
  { title: "Answer in JSON by a schema", prompt: CODE, form: "json", formText: JSON.stringify(SCHEMA, null, 2) },
  { title: "Answer one of three words", prompt: `Is this code Python, C or Rust?\n\n${CODE}`, form: "choice", formText: "Python\nC\nRust" },
  { title: "Continue a program, sampled", prompt: "import json\n\n\ndef load_settings(path):\n", mode: "completion", temperature: 0.8 },
];
