# SPDX-FileCopyrightText: 2026 The QKVShare authors
# SPDX-License-Identifier: Apache-2.0
"""Every example is a flow by docs/flow.schema.json, and what the parser refuses the schema refuses as well.

Usage: flow_schema_test.py SOURCE_DIR. Exit status 77: the packages it needs are not there.
"""
import json
import pathlib
import sys

try:
    import jsonschema
    import yaml
except ImportError as missing:
    print(f"skipped: {missing}; scripts/setup.sh installs it")
    sys.exit(77)

WRONG = {
    "no agents": "name: x",
    "a key that nobody knows": "agents: [{name: a, promt: hi}]",
    "nothing to read": "agents: [{name: a}]",
    "a system message behind an inherited context": "agents: [{name: a, inherits: b, system: s}]",
    "reads and inherits": "agents: [{name: a, inherits: b, reads: c, prompt: p}]",
    "an edge without from": "agents: [{name: a, prompt: p, reads: [{budget: 3}]}]",
    "a splice that nobody knows": "agents: [{name: a, prompt: p, reads: {from: b, splice: hid}}]",
    "splice where nothing is moved": "agents: [{name: a, prompt: p, inherits: {from: b, splice: hide}}]",
    "a document with a prompt": "agents: [{name: a, document: d, prompt: p}]",
    "several to inherit from": "agents: [{name: a, inherits: [b, c]}]",
    "an empty list": "agents: [{name: a, prompt: p, foreach: []}]",
    "a number out of range": "agents: [{name: a, prompt: p, max_tokens: 0}]",
}


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    schema = json.loads((root / "docs" / "flow.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    failed = 0
    examples = sorted((root / "examples").glob("*.yaml"))
    for path in examples:
        for error in validator.iter_errors(yaml.safe_load(path.read_text())):
            print(f"{path.name}: {error.json_path}: {error.message}")
            failed += 1
    for what, text in WRONG.items():
        if validator.is_valid(yaml.safe_load(text)):
            print(f"accepted: {what}")
            failed += 1
    print(f"{len(examples)} examples, {len(WRONG)} wrong flows, {failed} failures")
    return 1 if failed or not examples else 0


if __name__ == "__main__":
    sys.exit(main())
