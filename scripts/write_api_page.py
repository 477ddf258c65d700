"""Write docs/api.md, the reference of papilio.kernels, from signatures and docstrings.

python -m scripts.write_api_page

A test fails if the page is out of date.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent

from training.command_line import command_parser, user_errors_as_messages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """\
# API

<!-- Written by python -m scripts.write_api_page. Edit the docstrings in kernels/ instead. -->

Letters in shapes: B batch, T tokens (T_q queries, T_k keys), H heads (H_kv key-value heads),
D head_dim; N rows, C width of the residual stream, F any other width, V vocabulary. See also the
[mathematics](kernels.md) and the [examples](../examples).
"""
NAMES = {
    "attention": "flash_attention flash_attention_packed",
    "mask/block_mask": "BlockSparseMask BlockSparseMask.density BlockSparseMask.to_dense "
    "BlockSparseMask.to_flex BlockSparseMask.from_flex",
    "mask/patterns": "butterfly sliding_window global_blocks streaming strided random per_head",
    "context/interface": "context_attention",
    "context/group": "ContextGroup ContextGroup.shard ContextGroup.unshard ContextGroup.positions",
    "for_torch": "register_with_torch unregister_with_torch",
    "for_transformers": "register_with_transformers",
    "flash_attn": "flash_attn_func flash_attn_varlen_func",
    "fused/cross_entropy": "linear_cross_entropy",
    "fused/gelu_mlp": "gelu_mlp",
    "fused/layer_norm": "add_layer_norm add_rms_norm",
    "fused/linear": "linear",
    "fused/rotary": "rotary_qkv",
}
"""Names on the page, by their source file in kernels/."""

_KNOWN = {name for names in NAMES.values() for name in names.split()}
_TITLES = {f"{title}:": f"**{title}**\n" for title in ("Attributes", "Returns", "Raises")}
_TITLES["Args:"] = "**Arguments**\n"


def render_page() -> str:
    """Render the text of docs/api.md."""
    entries = {
        name: render(ROOT / "kernels" / f"{file}.py", name)
        for file, names in NAMES.items()
        for name in names.split()
    }
    contents = "".join(f"- {link(name)}\n" for name in entries if "." not in name)
    return "\n".join([HEAD, contents, *entries.values()])


def render(file: Path, name: str) -> str:
    """Render heading, signature and docstring of a function, class or method from its source."""
    source = file.read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):  # the last definition, because overloads come before it
        *_, node = (x for x in ast.iter_child_nodes(node) if getattr(x, "name", None) == part)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    code, doc = signature(node, source), ast.get_docstring(node)
    assert doc is not None, f"{file}: {name} has no docstring"
    if "." in name:
        return f"### {name}\n\n```python\n{code}\n```\n\n{markdown(doc)}\n"
    code = f"from {package(file, name)} import {name}\n\n{code}"
    return f"## {name}\n\n```python\n{code}\n```\n\n{markdown(doc)}\n"


def package(file: Path, name: str) -> str:
    """Package that exports a name, or else the module that defines it."""
    for folder, exporter in (("papilio", "papilio"), ("kernels", "papilio.kernels")):
        if f'"{name}"' in (ROOT / folder / "__init__.py").read_text():
            return exporter
    if (ROOT / "papilio" / file.name).exists():
        return f"papilio.{file.stem}"
    return f"papilio.{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}"


def signature(node: ast.FunctionDef | ast.ClassDef, source: str) -> str:
    """Signature of a function, or of the constructor of a class, without comments."""
    if isinstance(node, ast.ClassDef):
        init = next(x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
        init_signature = signature(init, source).removesuffix(" -> None")
        return init_signature.replace("def __init__(self, ", f"class {node.name}(")
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    return re.sub(r"  #.*", "", dedent("\n".join(lines))).removesuffix(":")


def markdown(doc: str) -> str:
    """Convert a Google-style docstring to Markdown, with lists of arguments and errors."""
    lines, in_section = [], False
    for line in re.sub(r"`([\w.]+)`", lambda match: link(match[1]), doc).splitlines():
        in_section = line in _TITLES or (in_section and line[:1] in ("", " "))
        if line in _TITLES:
            line = _TITLES[line]
        elif in_section and (entry := re.match(r"    (\w+(?:, \w+)*): ", line)):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            line = f"- {names}: {line[entry.end() :]}"
        elif in_section:
            line = line.removeprefix("    ")
        lines.append(line)
    return "\n".join(lines)


def link(name: str) -> str:
    """Format a name as code, with a link to its entry if it has one."""
    return f"[`{name}`](#{name.lower().replace('.', '')})" if name in _KNOWN else f"`{name}`"


def main() -> None:
    """Write the page."""
    command_parser(__doc__, __spec__).parse_args()
    PAGE.write_text(render_page())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
